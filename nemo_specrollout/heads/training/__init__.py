# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 head as a model: created, trained, and measured by its expected acceptance."""

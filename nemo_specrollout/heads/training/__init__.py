# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 heads as models, which are created, trained, and measured by their expected acceptance."""

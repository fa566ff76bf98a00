# SPDX-License-Identifier: Apache-2.0
"""The EAGLE-3 head: its model, folder, trainer and measured acceptance."""

# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 heads: model, folder, trainer and measured acceptance."""

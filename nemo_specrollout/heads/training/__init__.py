# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 heads as PyTorch models, with their training and the measurement of their expected acceptance."""

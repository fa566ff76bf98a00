# SPDX-License-Identifier: Apache-2.0
"""Policies in training checkpoints, and the mapping of weights between Megatron-Core and Hugging Face."""

# SPDX-License-Identifier: Apache-2.0
"""Reads policies out of training checkpoints, and maps weights between Megatron-Core and Hugging Face."""

# SPDX-License-Identifier: Apache-2.0
"""Trains draft heads: features, the head and its trainer, policy checkpoints, and refreshes."""

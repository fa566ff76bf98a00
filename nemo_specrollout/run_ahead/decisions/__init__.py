# SPDX-License-Identifier: Apache-2.0
"""Decides which texts of coming steps, and which branches at their near-ties, are made ahead. No torch, no clock."""

# SPDX-License-Identifier: Apache-2.0
"""Decides what is made ahead: near-ties at which an update may change a text, and branches there. No torch, no clock."""

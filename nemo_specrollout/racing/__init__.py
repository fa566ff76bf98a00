# SPDX-License-Identifier: Apache-2.0
"""Rolls requests out over several engines: deals them out, moves stragglers, and races them."""

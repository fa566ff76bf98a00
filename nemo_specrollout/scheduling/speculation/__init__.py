# SPDX-License-Identifier: Apache-2.0
"""Policies of an engine step: whether to draft, how deep, and how many draft tokens to verify."""

# SPDX-License-Identifier: Apache-2.0
"""Decides for each engine step how deep a model drafts, how many draft tokens are verified, and whether drafters rest."""

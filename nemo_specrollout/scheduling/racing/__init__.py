# SPDX-License-Identifier: Apache-2.0
"""Policies of the end of a rollout: which request starts where, moves, or is raced by several engines."""

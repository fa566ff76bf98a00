# SPDX-License-Identifier: Apache-2.0
"""Policies of a rollout's tail: where requests start, which of them move, and which are raced by several engines."""

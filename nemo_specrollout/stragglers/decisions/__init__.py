# SPDX-License-Identifier: Apache-2.0
"""Tail policies, which decide where requests start, which of them move, and which are raced by several engines."""

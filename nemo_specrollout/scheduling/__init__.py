# SPDX-License-Identifier: Apache-2.0
"""Pure policies that decide how much to draft, when to refresh a head, which straggler to move, where to draft."""

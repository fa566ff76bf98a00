# SPDX-License-Identifier: Apache-2.0
"""Drafters in processes of their own: the protocol, its verifier side and its drafter side."""

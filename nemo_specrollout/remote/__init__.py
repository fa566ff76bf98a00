# SPDX-License-Identifier: Apache-2.0
"""Remote drafters, which run in processes of their own, with the protocol, its verifier side and its drafter side."""

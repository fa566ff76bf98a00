# SPDX-License-Identifier: Apache-2.0
"""How drafts are proposed in an engine: the draft router in the place of vLLM's speculator, and what it asks."""

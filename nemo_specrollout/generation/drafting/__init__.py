# SPDX-License-Identifier: Apache-2.0
"""How drafts are proposed in an engine, by the draft router in the place of vLLM's speculator and by what it asks."""

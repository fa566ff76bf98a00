# SPDX-License-Identifier: Apache-2.0
"""Proposes drafts in an engine. The draft router takes the place of vLLM's speculator, and the other modules are its parts."""

# SPDX-License-Identifier: Apache-2.0
"""How we enter vLLM: the vLLM worker, which the rooms engine, drafting and step serve."""

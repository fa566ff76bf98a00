# SPDX-License-Identifier: Apache-2.0
"""How this package enters vLLM. The vLLM worker puts the parts in `engine`, `drafting`, `step` and `runners` together."""

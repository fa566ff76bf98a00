# SPDX-License-Identifier: Apache-2.0
"""Everything that meets vLLM: the worker, verification, drafting, draft heads, and the engine."""

# SPDX-License-Identifier: Apache-2.0
"""The code that starts and extends vLLM. `vllm_worker.py` puts `engine`, `drafting`, `step` and `runners` together."""

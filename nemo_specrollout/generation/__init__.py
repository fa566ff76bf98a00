# SPDX-License-Identifier: Apache-2.0
"""The code that starts and extends vLLM. `vllm_worker.py` combines the packages `engine`, `drafting`, `step` and `runners`."""

# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's V2 model runner on a CPU: a vLLM platform, and CPU bodies of its Triton kernels. Imports nothing of ours."""

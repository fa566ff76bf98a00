# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's V2 model runner on a CPU: a vLLM platform, and CPU bodies of the runner's Triton kernels.

This package imports nothing of `nemo_specrollout`.
"""

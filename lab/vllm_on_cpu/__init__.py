# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's V2 model runner on a CPU: a vLLM platform, and CPU bodies of the runner's Triton kernels and of the product's.

Only `own_kernels` imports anything of the product.
"""

# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's V2 model runner on a CPU, by a vLLM platform and CPU bodies of the runner's and the product's Triton kernels.

Only `own_kernels` imports the product.
"""

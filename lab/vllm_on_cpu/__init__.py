# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's V2 model runner on a CPU, with a platform for vLLM and with CPU functions that replace Triton kernels.

Such a function is called the body of its kernel. There are bodies for the runner's kernels and for those of the product, which
is `nemo_specrollout`. Only `own_kernels` imports the product.
"""

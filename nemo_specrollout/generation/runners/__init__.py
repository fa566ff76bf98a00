# SPDX-License-Identifier: Apache-2.0
"""The code that differs between versions of vLLM. Each family of V2 model runners has a class with the same interface."""

# SPDX-License-Identifier: Apache-2.0
"""What differs between versions of vLLM. Each family of V2 model runners has a class, and all have the same interface."""

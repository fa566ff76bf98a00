# SPDX-License-Identifier: Apache-2.0
"""The drafter side, which is a process with a vLLM engine whose requests are shadow sequences."""

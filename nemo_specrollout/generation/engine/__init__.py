# SPDX-License-Identifier: Apache-2.0
"""How an engine is started and asked: vLLM's arguments and versions, requests, and transfers between host and device."""

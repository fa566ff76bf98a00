# SPDX-License-Identifier: Apache-2.0
"""An engine: arguments of vLLM, its supported versions, its requests, and values that travel between host and device."""

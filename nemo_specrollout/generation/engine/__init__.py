# SPDX-License-Identifier: Apache-2.0
"""The code that starts a vLLM engine and talks to it, such as its arguments, its requests, and copies to and from a GPU."""

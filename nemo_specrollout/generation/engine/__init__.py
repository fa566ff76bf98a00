# SPDX-License-Identifier: Apache-2.0
"""The parts that start a vLLM engine and talk to it, such as its arguments, its requests, and copies to and from a GPU."""

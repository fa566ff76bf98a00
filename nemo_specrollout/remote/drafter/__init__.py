# SPDX-License-Identifier: Apache-2.0
"""The process of a remote drafter. The requests of its vLLM engine are shadow sequences, copies of verifiers' requests."""

# SPDX-License-Identifier: Apache-2.0
"""Remote drafters, and the protocol by which they talk to verifiers.

A remote drafter is a draft model in a process of its own. A verifier is an engine of the policy that verifies its draft
tokens.
"""

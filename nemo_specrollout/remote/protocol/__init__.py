# SPDX-License-Identifier: Apache-2.0
"""The messages between verifiers and remote drafters, the state machines of both sides, and the transport."""

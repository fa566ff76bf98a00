# SPDX-License-Identifier: Apache-2.0
"""The wire between verifiers and drafters: messages, state machines of both sides, transport; no engine."""

# SPDX-License-Identifier: Apache-2.0
"""The protocol between verifiers (engines of the policy) and remote drafters: messages, both sides, and the transport.

docs/concepts/remote-protocol.md tells the life of a request, and the invariants. In short: a `Step` opens requests with their
texts (`Open`), commits what the policy sampled, and closes requests. `Drafts` carries the tokens drafted beyond these texts.

Every message can be understood alone. A draft token carries its position and the hash of all text before it. A commit carries
length and hash of the text that it extends. So a late, duplicated, lost or reordered message is recognized.
"""

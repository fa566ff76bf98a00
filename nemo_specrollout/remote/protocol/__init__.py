# SPDX-License-Identifier: Apache-2.0
"""The protocol between verifiers (engines of the policy) and remote drafters, with messages, both sides, and transport.

docs/concepts/remote-protocol.md describes the life of a request and the invariants. In short, a `Step` opens requests with
their texts (`Open`), commits what the policy has sampled, and closes requests. `Drafts` carries the tokens that were drafted
beyond these texts.

Every message can be understood without others. A draft token carries its position and the hash of all text before it. A commit
carries length and hash of the text that it extends. So a receiver recognizes late, duplicated, lost and reordered messages.
"""

# SPDX-License-Identifier: Apache-2.0
"""The protocol between verifiers (engines of the policy) and remote drafters, with messages, both sides, and transport.

docs/concepts/remote-protocol.md describes the life of a request and the invariants. In short, a verifier sends a `Step` after
each engine step. The `Step` opens new requests with their texts (`Open`), commits the tokens that the policy has sampled for
other requests, and closes requests that have ended. A drafter sends `Drafts`, which have the tokens that it has drafted beyond
these texts.

Every message can be understood without the others, because it says to which text it belongs. A draft token carries its
position and the hash of all text before it. A commit carries the length and the hash of the text that it extends. So a
receiver recognizes messages that are late, duplicated, lost or reordered.
"""

# SPDX-License-Identifier: Apache-2.0
"""The protocol between verifiers (engines of the policy) and remote drafters: messages, both sides, and the transport.

The life of one request, with the module that takes each step:

1. A verifier says `Hello` to a drafter; the drafter answers `Welcome`, or `Refuse` with a reason (both sides).
2. A request takes a request slot of the verifier. `VerifierSide` assigns it to the least loaded drafter that is ready.
3. The next `Step` carries an `Open` with the request's text and sampling. `DraftBuffers` starts an empty draft buffer.
4. `DrafterSide` opens a shadow sequence for it. The drafter's engine extends each shadow sequence by a token in each of its
   steps, up to a window beyond the committed text.
5. `Drafts` carries the new tokens to the verifier. `DraftBuffers` appends each token that continues the request's text.
6. The engine verifies the buffered tokens. The next `Step` commits what the policy sampled. `ShadowSequences` compares it with
   the shadow sequence, which is corrected where the policy sampled another token.
7. When the request ends, a `Step` closes it, and the drafter frees the shadow sequence.

Invariants:

- Every message can be understood alone. A draft token carries its position and the hash of all text before it. A commit
  carries length and hash of the text that it extends. So a late, duplicated, lost or reordered message is recognized.
- The token at position p of a draft buffer was drafted for exactly the text before p: committed tokens, then buffered ones.
- The first `committed` tokens of a shadow sequence are the verifier's. Its text never becomes shorter than that.
- A repeated commit changes nothing. If a commit was lost, the next one still applies where the shadow sequence had drafted the
  missing text itself. Otherwise the drafter lists the request as `lacking`, and the verifier opens it again.
- A gap in the numbers of the `Drafts` messages tells the verifier that drafts were lost. It asks for them with `resends`.
- A request slot has one drafter or none. A drafter that failed and came back learns all of its requests again.
- Neither side waits for the other. Neither owns a socket or a clock, and the engine of a drafter belongs to its service.
"""

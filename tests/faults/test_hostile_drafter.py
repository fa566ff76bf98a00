# SPDX-License-Identifier: Apache-2.0
"""A drafter that reports false figures, or floods between good frames, only costs speed for a while."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from nemo_specrollout.remote.protocol.messages import (
    DRAFT_ROW,
    Drafts,
    FrameError,
    Hello,
    Welcome,
    decode,
    encode,
)
from nemo_specrollout.remote.protocol.peer import FIRST_PAUSE_S, LONGEST_PAUSE_S, PeerState
from nemo_specrollout.remote.protocol.verifier_side import (
    PolicyModel,
    StreamRequest,
    VerifierSide,
)

pytestmark = pytest.mark.unit

SESSION, DRAFTER = 11, 7


def drafts(number: int, num_rows: int = 0, **more: Any) -> Drafts:
    """Returns a drafter's answer, with rows of an unknown request."""
    known = {
        "session": SESSION, "drafter": DRAFTER, "number": number, "token_s": 0.01, "num_shadows": 1,
        "drafts": np.zeros(num_rows, DRAFT_ROW).tobytes(), "lacking": b"", "step": 0, "refused": b"", "reason": "",
    }  # fmt: skip
    return Drafts(**{**known, **more})


@pytest.mark.parametrize("token_s", [math.nan, math.inf, -1.0, 3359.0])
def test_a_frame_with_a_time_out_of_range_is_invalid(token_s: float) -> None:
    with pytest.raises(FrameError, match="token_s out of range"):
        decode(msgspec.msgpack.encode(drafts(1, token_s=token_s)))
    assert decode(encode(drafts(1, token_s=59.0))) == drafts(1, token_s=59.0)


class Verifier:
    """A verifier with one drafter, one request, and a simulated clock."""

    def __init__(self) -> None:
        self.side = VerifierSide(SESSION, 1, 1, 4, PolicyModel(41))
        self.side.open(StreamRequest(0, seed=3, temperature=1.0, top_k=0, top_p=1.0, limit=50))
        self.peer, self.now_s = self.side.peers[0], 100.0

    def follow(self, seconds: float = 0.1) -> bool:
        """Takes a step of the engine; returns whether it greets the drafter, which then answers at once."""
        self.now_s += seconds
        greeted = False
        for _, message in self.side.follow(np.zeros((1, 64), np.int32), np.array([5]), self.now_s):
            if isinstance(message, Hello):
                self.hear(Welcome(SESSION, DRAFTER, 64, 4))
                greeted = True
        return greeted

    def hear(self, message: Any) -> None:
        self.side.receive(0, decode(encode(message)), self.now_s)


def flood(verifier: Verifier, number: int) -> None:
    """Sends some good frames, and then far more rows than were asked for, in a valid frame."""
    for i in range(3):
        verifier.follow()
        verifier.hear(drafts(number + i))
    assert verifier.peer.state is PeerState.READY
    verifier.hear(drafts(number + 3, num_rows=60_000))
    assert verifier.peer.state is PeerState.AWAY


def test_good_frames_between_floods_do_not_reset_the_pause() -> None:
    verifier, pauses = Verifier(), []
    assert verifier.follow()
    for turn in range(9):
        flood(verifier, 10 * turn)
        dropped_s = verifier.now_s
        while not verifier.follow():
            pass
        pauses.append(verifier.now_s - dropped_s)
    wanted = [min(FIRST_PAUSE_S * 2**i, LONGEST_PAUSE_S) for i in range(9)]
    assert pauses == pytest.approx(wanted, abs=0.11)
    assert verifier.peer.num_failures == 9


def test_a_long_time_without_failure_resets_the_pause() -> None:
    verifier = Verifier()
    verifier.follow()
    flood(verifier, 0)
    flood_again = 10
    while not verifier.follow():
        pass
    for i in range(int(LONGEST_PAUSE_S / 0.1) + 2):
        verifier.follow()
        verifier.hear(drafts(flood_again + i))
    flood(verifier, 1000)
    dropped_s = verifier.now_s
    while not verifier.follow():
        pass
    assert verifier.now_s - dropped_s == pytest.approx(FIRST_PAUSE_S, abs=0.11)

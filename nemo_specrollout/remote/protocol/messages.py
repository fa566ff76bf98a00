# SPDX-License-Identifier: Apache-2.0
"""What drafters and verifiers say to each other: typed, bounded, packed by msgspec. Nothing here can carry code.

What concerns many requests travels in columns, little-endian bytes of one type, so that neither side loops over them.
A verifier's request is known by its session (one run of one engine) and a number that is never used twice in it.
"""

from typing import Annotated, Any

import msgspec
import numpy as np

PROTOCOL = 1
MAX_FRAME_BYTES = 16 << 20
MAX_COLUMN = 1 << 16
LONGEST_TOKEN_S = 60.0
"""Longest time of a draft token that a drafter may report. The verifier drops a drafter that is silent for much less."""


# No integer that a 64-bit column could not hold, no text without bound.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Line = Annotated[str, msgspec.Meta(max_length=4096)]


class FrameError(ValueError):
    """A frame that no peer of this protocol sends."""


class Hello(msgspec.Struct, tag="hello", forbid_unknown_fields=True, frozen=True):
    """Verifier: who I am, and what a drafter of mine must match."""

    protocol: Count
    session: Count
    vocab_size: Count
    tokenizer: Line
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=1024)]


class Welcome(msgspec.Struct, tag="welcome", forbid_unknown_fields=True, frozen=True):
    """Drafter: I draft for you. `drafter` is one run of one engine; `num_shadows` is how many requests it can hold."""

    session: Count
    drafter: Count
    draft_version: Count
    max_model_len: Count
    num_shadows: Count


class Refuse(msgspec.Struct, tag="refuse", forbid_unknown_fields=True, frozen=True):
    """Drafter: I do not draft for you, and why."""

    session: Count
    reason: Line


class Open(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A request, with all of its text so far (int32), and how it is sampled. It never grows beyond `limit` tokens."""

    request: Count
    seed: Count
    temperature: float
    top_k: Count
    top_p: float
    limit: Count
    window: Count
    tokens: bytes


class Step(msgspec.Struct, tag="step", forbid_unknown_fields=True, frozen=True):
    """Verifier, after each of its steps: requests opened and closed (int64), and what the others have committed.

    A row of the commits: request int64; base int64, how long its text was; prefix_hash uint64, of those first `base` tokens;
    count int64 of new tokens; window uint8, how far its shadow may run ahead of them; resend uint8, 1 to be told again what
    was drafted beyond them. `tokens` int32 of all rows.
    """

    session: Count
    number: Count
    sent_ns: Count
    opens: Annotated[list[Open], msgspec.Meta(max_length=4096)]
    closes: bytes
    requests: bytes
    bases: bytes
    hashes: bytes
    counts: bytes
    windows: bytes
    resends: bytes
    tokens: bytes


class Drafts(msgspec.Struct, tag="drafts", forbid_unknown_fields=True, frozen=True):
    """Drafter, after each of its steps and in answer to each `Step`.

    A row: request int64; position int64 of the token in its text; prefix_hash uint64 of all tokens before it; token int32;
    level int8 of its evidence. `lacking` int64: requests that it has to be told again. `answers` is the number of the last
    `Step` that came, which waited `held_ns` until this was sent; `token_s` is what a token takes it for
    each of the requests that it drafts for.
    """

    session: Count
    drafter: Count
    number: Count
    answers: Count
    echo_ns: Count
    held_ns: Count
    draft_version: Count
    token_s: float
    num_shadows: Count
    requests: bytes
    positions: bytes
    hashes: bytes
    tokens: bytes
    levels: bytes
    lacking: bytes


class Publish(msgspec.Struct, tag="publish", forbid_unknown_fields=True, frozen=True):
    """The draft model's trainer says that its weights are now in `folder`, a path of the drafter's machine."""

    folder: Line
    draft_version: Count


class Published(msgspec.Struct, tag="published", forbid_unknown_fields=True, frozen=True):
    """Drafter: I draft with the weights of that version; or, if `error` is not empty, why I do not."""

    draft_version: Count
    error: Line


Message = Hello | Welcome | Refuse | Step | Drafts | Publish | Published
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode(frame: bytes) -> Message:
    """The message in `frame`. Raises FrameError for anything else, oversized frames and ragged columns included."""
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(frame)} bytes; the most is {MAX_FRAME_BYTES}")
    try:
        message: Message = _decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FrameError(str(error)) from None
    if isinstance(message, Step):
        _check_columns(
            message, (("requests", 8), ("bases", 8), ("hashes", 8), ("counts", 8), ("windows", 1), ("resends", 1))
        )
        counts = column(message.counts, np.int64)
        if len(counts) and (counts.min() < 0 or counts.max() > MAX_COLUMN):
            raise FrameError("a count out of range")
        if int(counts.sum()) * 4 != len(message.tokens) or len(message.closes) % 8:
            raise FrameError("ragged columns")
        if any(len(o.tokens) % 4 for o in message.opens):
            raise FrameError("ragged tokens")
    if isinstance(message, Drafts):
        if not 0.0 <= message.token_s <= LONGEST_TOKEN_S:  # false of NaN too
            raise FrameError("token_s out of range")
        _check_columns(message, (("requests", 8), ("positions", 8), ("hashes", 8), ("tokens", 4), ("levels", 1)))
        if len(message.lacking) % 8:
            raise FrameError("ragged columns")
    return message


def _check_columns(message: Any, columns: tuple[tuple[str, int], ...]) -> None:
    sizes = {len(getattr(message, name)) / width for name, width in columns}
    if len(sizes) != 1 or sizes.pop() > MAX_COLUMN:
        raise FrameError("ragged columns")


def column(data: bytes, dtype: type) -> np.ndarray:
    """A column as an array of its own: compiled kernels do not take what they may not write to."""
    return np.frombuffer(data, dtype).copy()

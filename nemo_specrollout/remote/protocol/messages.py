# SPDX-License-Identifier: Apache-2.0
"""The messages between verifiers and remote drafters. They have types and limited sizes, and they cannot carry code.

msgspec packs them. The values of many requests travel as rows of one NumPy type, packed as little-endian bytes, because
neither side should loop over requests in Python. Each process of a verifier has one session. A request is identified by its
session and by a number that the session never uses twice.
"""

from typing import Annotated, Any

import msgspec
import numpy as np

PROTOCOL = 3
"""Version of the protocol, which must be the same on both sides."""
MAX_FRAME_BYTES = 16 << 20
MAX_ROWS = 1 << 16
"""Maximum number of rows in a message, and of tokens in one commit."""
MAX_OPENS = 4096
"""Maximum number of requests that one `Step` opens."""
LONGEST_TEXT_BYTES = MAX_FRAME_BYTES - (2 << 20)
"""Maximum number of bytes of the text with which a request is opened. The rest of a frame is for other requests in the
`Step`."""
OPENED_BYTES = 1 << 20
"""Maximum number of bytes of opening texts on the way to a drafter. An opening text is the text with which a `Step` opens a
request, and it is on its way until the drafter has read it. Packing and signing so many bytes takes a few milliseconds of an
engine step. Requests beyond this limit are opened by later `Step` messages."""
MAX_STOP_TOKENS = 1024
NO_SESSION = 0
"""Number of the session in a `Refuse` that answers an unreadable message, because the session of such a message is not known.
No verifier has this number."""
LONGEST_REASON = 1000
"""Maximum number of characters of a text that `as_line` keeps. A `Line` has room for more."""
LONGEST_TOKEN_S = 60.0
"""Largest valid `Drafts.token_s`. A verifier drops a drafter that has been silent for a much shorter time."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Integer that an int64 can hold."""
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Line = Annotated[str, msgspec.Meta(max_length=4096)]

COMMIT_ROW = np.dtype(
    [
        ("request", np.int64),
        ("base", np.int64),  # length of the text that the commit extends, in tokens
        ("prefix_hash", np.uint64),  # of that text
        ("count", np.int64),  # new tokens
        ("window", np.uint8),  # see `Open`
    ],
    align=True,
)
"""Row of a `Step` that says by which tokens the text of one request has grown."""
DRAFT_ROW = np.dtype(
    [
        ("owner", np.int64),  # number of the request or, inside of a drafter, of its shadow sequence
        ("position", np.int64),  # index of the token in the text
        ("prefix_hash", np.uint64),  # of all tokens before it. The engine writes 0, and `append` fills it in.
        ("token", np.int32),
        ("level", np.int8),  # evidence level (`drafters.base`)
    ],
    align=True,
)
"""Row of a message `Drafts` with one draft token."""


class FrameError(ValueError):
    """Raised for a frame that cannot come from a peer with the same protocol and the same secret."""


class _Tagged(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag=str.lower):
    """Base class of the messages. When they are packed, they carry the names of their classes."""


class Hello(_Tagged, frozen=True):
    """Introduces a verifier to a drafter, and states the properties of the policy that the draft model has to match."""

    protocol: Count
    session: Count
    vocab_size: Count
    tokenizer: Line
    """Fingerprint of the policy's tokenizer, or empty if unknown."""
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=MAX_STOP_TOKENS)]
    """Tokens that end a text, so that nothing is drafted after them."""


class Welcome(_Tagged, frozen=True):
    """Tells a verifier that the drafter accepts its session."""

    session: Count
    drafter: Count
    """Random number of the drafter process, which is different after a restart."""
    max_model_len: Count
    num_shadows: Count
    """Maximum number of requests for which the drafter can draft at a time, of all verifiers together."""


class Refuse(_Tagged, frozen=True):
    """Tells a verifier why the drafter refuses its session or one of its messages."""

    session: Count
    reason: Line


class Open(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Describes a request that the drafter does not know yet, with its text so far and its sampling parameters."""

    request: Count
    seed: Count
    temperature: float
    top_k: Count
    top_p: float
    limit: Count
    """Maximum number of tokens of the request's text."""
    window: Count
    """Maximum number of tokens that the drafter may draft beyond the tokens that the verifier has committed."""
    tokens: bytes
    """The text so far, as int32 token ids."""


class Step(_Tagged, frozen=True):
    """Tells a drafter which requests were opened, continued and closed in an engine step of the verifier."""

    session: Count
    number: Count
    """Number of this message in the session, from 1 on. `Drafts.step` says up to which number the drafter has read."""
    opens: Annotated[list[Open], msgspec.Meta(max_length=MAX_OPENS)]
    closes: bytes
    """Numbers of the requests that ended, as int64."""
    commits: bytes
    """One `COMMIT_ROW` for each request that continues, with or without new tokens."""
    tokens: bytes
    """The new tokens of all rows in `commits`, one row after another, as int32 token ids."""

    @property
    def num_text_bytes(self) -> int:
        """Number of bytes of the texts with which requests are opened."""
        return sum(len(opening.tokens) for opening in self.opens)


class Drafts(_Tagged, frozen=True):
    """Brings draft tokens to a verifier, after each engine step of the drafter and in answer to each `Step`."""

    session: Count
    drafter: Count
    number: Count
    """Number of this message in the session. A gap in the numbers tells the verifier that a message was lost."""
    step: Count
    """Number of the latest `Step` that the drafter has read, or 0 for none."""
    token_s: float
    """Seconds that the drafter takes to draft one token for each of its requests."""
    num_shadows: Count
    """Number of shadow sequences in use, of all verifiers together."""
    drafts: bytes
    """One `DRAFT_ROW` for each draft token."""
    lacking: bytes
    """Numbers of the requests that the verifier has to open again, because the drafter does not have their texts, as int64."""
    refused: bytes
    """Numbers of the requests for which the drafter will never draft, as int64."""
    reason: Line
    """Reason of the latest refusal, or empty if `refused` is empty."""


class Publish(_Tagged, frozen=True):
    """Asks a drafter to draft with the weights in a folder from now on.

    The sender is called a publisher. It is, for example, the command `publish-draft`.
    """

    folder: Line
    """Absolute path of the folder with the weights, on the drafter's machine."""
    version: Count
    """Version of the weights, a number that the publisher chooses. The answer repeats it."""


class Published(_Tagged, frozen=True):
    """Tells a publisher whether the drafter uses the weights of its `Publish` now."""

    version: Count
    error: Line
    """One sentence that says why the drafter keeps its old weights, or empty if it uses the new ones."""


def refusal_of(message: "Message", reason: str) -> "Refuse | Published":
    """Returns the message with which a drafter refuses `message`, for the given reason.

    It is a `Published` with an error if `message` is a `Publish`, and a `Refuse` otherwise.
    """
    if isinstance(message, Publish):
        return Published(message.version, reason)
    return Refuse(getattr(message, "session", NO_SESSION), reason)


def as_line(text: object) -> str:
    """Returns a text as a single line of at most `LONGEST_REASON` characters. Replaces characters that UTF-8 cannot encode."""
    return " ".join(str(text).split()).encode(errors="replace").decode()[:LONGEST_REASON]


Message = Hello | Welcome | Refuse | Step | Drafts | Publish | Published
_decoder = msgspec.msgpack.Decoder(Message)
encode = msgspec.msgpack.Encoder().encode


def decode(frame: bytes) -> Message:
    """Returns the message in `frame`.

    Raises FrameError if there is none, if the frame is too large, if a row is incomplete, or if a number is out of range.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES} are allowed")
    try:
        message: Message = _decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FrameError(str(error)) from None
    if isinstance(message, Step):
        _check_rows((message.closes, np.int64), (message.commits, COMMIT_ROW))
        counts = column(message.commits, COMMIT_ROW)["count"]
        if len(counts) and (counts.min() < 0 or counts.max() > MAX_ROWS):
            raise FrameError("a count out of range")
        if int(counts.sum()) * 4 != len(message.tokens) or any(len(opening.tokens) % 4 for opening in message.opens):
            raise FrameError("ragged tokens")
    elif isinstance(message, Drafts):
        if not 0.0 <= message.token_s <= LONGEST_TOKEN_S:  # also false for NaN
            raise FrameError("token_s out of range")
        _check_rows((message.lacking, np.int64), (message.refused, np.int64), (message.drafts, DRAFT_ROW))
    return message


def _check_rows(*parts: tuple[bytes, Any]) -> None:
    """Raises FrameError unless each part has complete rows and at most `MAX_ROWS` of them.

    `parts` are pairs of packed rows and the NumPy type of a row.
    """
    for data, type_ in parts:
        num_rows, rest = divmod(len(data), np.dtype(type_).itemsize)
        if rest or num_rows > MAX_ROWS:
            raise FrameError("ragged rows")


def column(data: bytes, dtype: Any) -> np.ndarray:
    """Returns the rows or numbers in `data` as an array of type `dtype`.

    The array is a copy that can be written to, because compiled kernels do not accept read-only arrays.
    """
    return np.frombuffer(data, dtype).copy()

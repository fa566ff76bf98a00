# SPDX-License-Identifier: Apache-2.0
"""Where drafters listen, and the secret that both ends share where others could reach them."""

import os
import re
import secrets
from collections.abc import Iterable

from nemo_specrollout.config.strict import ConfigError

SECRET_VARIABLE = "NEMO_SPECROLLOUT_SECRET"
SHORTEST_SECRET = 16
_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[\w.-]+):(\d{1,5})")
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def check_address(path: str, address: str, *, any_port: bool = True) -> None:
    """Raises ConfigError unless `address` is tcp://HOST:PORT. Port 0, any that is free, only where `any_port` allows it."""
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match[2]) > 65535 or (int(match[2]) == 0 and not any_port):
        raise ConfigError(f"{path}: {address!r} is no address; write tcp://HOST:PORT, e.g. tcp://127.0.0.1:5570")


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach it."""
    match = _ADDRESS.fullmatch(address)
    return match is not None and match[1] in _LOOPBACK


def shared_secret(addresses: Iterable[str]) -> bytes:
    """What both ends prove to know, from the environment. May be empty on the loopback only.

    Raises ConfigError if it is missing or short and an address is not a loopback.
    """
    secret = os.environ.get(SECRET_VARIABLE, "")
    if len(secret) < SHORTEST_SECRET and not all(map(is_loopback, addresses)):
        raise ConfigError(
            f"{SECRET_VARIABLE}: drafters that other machines can reach need a shared secret of at least {SHORTEST_SECRET} "
            "characters in the environment of both ends"
        )
    return as_key(secret)


def as_key(secret: str) -> bytes:
    """A secret as the transport takes it."""
    return secret.encode()[:64]


def secret_of_run() -> str:
    """The secret of drafters that a run places itself: that of the environment, or one that only the run knows.

    Raises ConfigError for one that is too short.
    """
    secret = os.environ.get(SECRET_VARIABLE, "")
    if secret and len(secret) < SHORTEST_SECRET:
        raise ConfigError(
            f"{SECRET_VARIABLE}: too short; give it at least {SHORTEST_SECRET} characters, or remove it: drafters that "
            "the run places then get one of their own"
        )
    return secret or secrets.token_hex(32)


def any_port(host: str) -> str:
    """The address of a socket that takes a free port of `host`, an IP address of this machine."""
    return f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"

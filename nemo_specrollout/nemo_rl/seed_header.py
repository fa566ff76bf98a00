# SPDX-License-Identifier: Apache-2.0
"""The header in which a client of the engines' HTTP server may send a seed, if it cannot send one in the body."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from nemo_specrollout.nemo_rl.request_seeds import header_seed

HEADER = b"x-specrollout-seed"
_LARGEST = 2**63 - 1
_Message = MutableMapping[str, Any]


class SeedHeader:
    """ASGI middleware: requests of the server are asked for within the seed of their header."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: _Message, receive: Any, send: Any) -> None:
        """Serves one request. A header that is no whole number from 0 to 2^63 - 1 is refused with status 400."""
        text = dict(scope.get("headers") or ()).get(HEADER) if scope["type"] == "http" else None
        if text is None:
            await self._app(scope, receive, send)
        elif not text.isdigit() or int(text) > _LARGEST:
            await _refuse(send, text)
        else:
            token = header_seed.set(int(text))
            try:
                await self._app(scope, receive, send)
            finally:
                header_seed.reset(token)


async def _refuse(send: Callable[[_Message], Awaitable[None]], text: bytes) -> None:
    sentence = f"X-Specrollout-Seed: {text.decode('latin-1')!r} is no whole number from 0 to 2^63 - 1"
    body = {"error": {"message": sentence, "type": "invalid_request_error", "code": 400}}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})

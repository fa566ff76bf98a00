# SPDX-License-Identifier: Apache-2.0
"""The header in which a client of the engines' HTTP server sends a seed, through a real ASGI application."""

import asyncio

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from nemo_specrollout.nemo_rl.engine_inputs import SeedHeader, header_seed

pytestmark = pytest.mark.unit


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    app.add_middleware(SeedHeader)

    @app.get("/seed")
    async def seed() -> int | None:
        return await asyncio.create_task(_in_a_task())  # as vLLM's engine client is asked

    return TestClient(app)


async def _in_a_task() -> int | None:
    return header_seed.get()


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_a_request_is_asked_for_within_the_seed_of_its_header(client: TestClient, seed: int) -> None:
    assert client.get("/seed", headers={"X-Specrollout-Seed": str(seed)}).json() == seed
    assert client.get("/seed").json() is None


@pytest.mark.parametrize("text", ["-1", "1.5", "x", "", str(2**63), "1" * 400, "1" * 5000])
def test_a_bad_header_is_refused_as_the_openai_client_expects(client: TestClient, text: str) -> None:
    answer = client.get("/seed", headers={"X-Specrollout-Seed": text})
    assert answer.status_code == 400 and "whole number from 0 to 2^63 - 1" in answer.json()["error"]["message"]

# SPDX-License-Identifier: Apache-2.0
"""Computes the token ids of first prompts of NeMo-Gym's coming rows before an agent asks for them (`run_ahead`).

An agent sends the `responses_create_params` of its row to Gym's model server, which turns them into a chat request. The HTTP
server of an engine turns this request into token ids. This module does both early. Gym's own code makes the request, in Gym's
Ray actor. Then an engine's HTTP server renders it on the route `/tokenize`, in the same way as on the chat route.

An agent may start with another prompt than its row has. The seed of a request depends on its tokens, so such a request finds
no text that was made ahead. Then only the time for making that text is lost.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import ray

from nemo_specrollout.generation.engine.remote_calls import EngineActorCalls
from nemo_specrollout.nemo_rl.ray_calls import PATIENCE_S, EngineClient, failure_text

GymRow = Mapping[str, Any]
_MAX_PROMPTS = 1 << 16
"""Largest number of rows whose prompts are kept. When there are more, the older half is forgotten."""
LEAST_TEXTS = 16
"""Smallest number of texts that must have been made before it is judged whether requests use them."""
LEAST_BROUGHT = 0.5
"""Smallest share of the texts that requests should use. If agents send the prompts of their rows, requests use all texts."""


class GymPrompts:
    """Finds the prompts of NeMo-Gym's rows. Owns the prompts that are known, so that each row is looked up once.

    Invariant: the prompt of a row is what Gym and the engines make of it, or None. It is None for rows with images, video or
    audio, for agents whose model server does not use the engines, and for prompts that an engine refuses.
    """

    gym: ClassVar[Any] = None
    """NeMo-Gym's Ray actor, or None before this process knows it."""

    def __init__(self, engines: EngineClient) -> None:
        self._engines = engines
        self._known: dict[str, list[int] | None] = {}
        self._is_off = False
        self._has_rows = False
        self._told = set[str]()
        """First words of the alarms that were raised already."""
        self._alarms: list[str] = []

    def prompts(self, rows: Sequence[GymRow]) -> list[list[int] | None]:
        """Returns the token ids of each row's first prompt, or None for a row whose prompt is not known."""
        self._has_rows = True
        keys = [json.dumps([row.get(name) for name in _ASKED], sort_keys=True, default=str) for row in rows]
        new = {key: row for key, row in zip(keys, rows, strict=True) if key not in self._known}
        if new and GymPrompts.gym is not None and not self._is_off:
            self._learn(new)
        return [self._known.get(key) for key in keys]

    def observe_brought(self, num_brought: int, num_texts: int) -> None:
        """Raises an alarm, at most once, if most texts were made for requests that never come.

        Until now, requests have used `num_brought` of `num_texts` texts.
        """
        if self._has_rows and num_texts >= LEAST_TEXTS and num_brought < LEAST_BROUGHT * num_texts:
            self._tell_once(
                "NeMo-Gym's agents begin with other prompts than their rows have",
                f"only {num_brought} of {num_texts} texts that were made ahead were for a request that came, and run_ahead "
                "makes texts in vain: remove run_ahead, or name such agents in tasks_without_drafts",
            )

    def take_alarms(self) -> list[str]:
        """Returns the alarms for the user since the last call."""
        alarms = self._alarms
        self._alarms = []
        return alarms

    def _tell_once(self, what: str, rest: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._alarms.append(f"{what}: {rest}")

    def _learn(self, rows: Mapping[str, GymRow]) -> None:
        """Looks up the prompts of rows. If that fails, it raises an alarm, and no more prompts are looked up."""
        try:
            asked = [{name: row.get(name) for name in _ASKED} for row in rows.values()]
            requests = ray.get(GymPrompts.gym.__ray_call__.remote(_request_maker(), asked), timeout=PATIENCE_S)
            found = self._rendered(dict(zip(rows, requests, strict=True)))
        except ray.exceptions.RayError as error:
            self._is_off = True
            self._tell_once(
                "the prompts of NeMo-Gym's rows cannot be known early",
                f"{failure_text(error)}; run_ahead makes no texts for them in this run: remove it if this comes again",
            )
            return
        if not any(found.values()):
            self._tell_once(
                "of a step's rows of NeMo-Gym no prompt is known early",
                "their agents have no model server of the kind vllm_model, or they bring images, video or audio; if so do all "
                "rows, remove run_ahead",
            )
        self._known |= found
        if len(self._known) > _MAX_PROMPTS:
            for oldest in list(self._known)[: _MAX_PROMPTS // 2]:
                del self._known[oldest]

    def _rendered(self, requests: Mapping[str, dict[str, Any] | None]) -> dict[str, list[int] | None]:
        """Returns the token ids of the prompt of each chat request, by the request's key.

        All living engines share the work.
        """
        found: dict[str, list[int] | None] = {key: None for key, request in requests.items() if request is None}
        known = {key: request for key, request in requests.items() if request is not None}
        keys = list(known)
        calls = {}
        for engine in range(self._engines.num_engines):
            share = keys[engine :: self._engines.num_engines]
            if share:
                asked = [known[key] for key in share]
                calls[engine] = (
                    share,
                    self._engines.start(engine, EngineActorCalls.specrollout_chat_prompts, requests=asked),
                )
        for share, call in calls.values():
            try:
                found |= zip(share, ray.get(call, timeout=PATIENCE_S), strict=True)
            except ray.exceptions.RayActorError:
                continue
        return found


_ASKED = ("agent_ref", "responses_create_params")
"""Fields of a row that determine its prompt."""


def with_new_gym(spin_up: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Starts NeMo-Gym's Ray actor with NeMo-RL's function `spin_up`, and notes the actor for the first step."""
    GymPrompts.gym = spin_up(*args, **kwargs)
    return GymPrompts.gym


def with_gym(roll_out: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Rolls out NeMo-Gym's rows with NeMo-RL's function `roll_out`, and notes Gym's Ray actor."""
    GymPrompts.gym = (kwargs.get("task_to_env") or {}).get("nemo_gym", GymPrompts.gym)
    return roll_out(*args, **kwargs)


def _request_maker() -> Callable[[Any, list[dict[str, Any]]], list[dict[str, Any] | None]]:
    """Returns a function for NeMo-Gym's Ray actor to call. Only there is Gym installed, and only there are its servers known.

    The returned function is defined inside this one so that Ray sends it by value. So the actor need not import this package.
    """

    def chat_request(servers: Any, row: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the fields of Gym's chat request for a row that determine the prompt, or None if they are not known."""
        from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming
        from nemo_gym.responses_converter import VLLMConverter
        from omegaconf import OmegaConf

        (agents,) = servers[row["agent_ref"]["name"]].values()
        (agent,) = agents.values()
        (models,) = servers[agent["model_server"]["name"]].values()
        model: Any = OmegaConf.to_container(models["vllm_model"], resolve=True)
        if model.get("is_responses_native") or model.get("use_completions_api"):
            return None
        params = dict(row["responses_create_params"])
        if isinstance(params["input"], str):
            params["input"] = [{"role": "user", "content": params["input"]}]
        converter = VLLMConverter(
            return_token_id_information=True, uses_reasoning_parser=bool(model.get("uses_reasoning_parser"))
        )
        checked = NeMoGymResponseCreateParamsNonStreaming.model_validate(params)
        chat = converter.responses_to_chat_completion_create_params(checked).model_dump(mode="json", exclude_unset=True)
        metadata = params.get("metadata") or {}
        parts = [
            part for message in chat["messages"] for part in message.get("content") or () if isinstance(part, dict)
        ]
        if any(part["type"] != "text" for part in parts) or any(name.startswith("audio_") for name in metadata):
            return None
        for message in chat["messages"]:
            if message["role"] == "developer" and model.get("replace_developer_role_with_system"):
                message["role"] = "system"
        template = {"reasoning_effort": chat["reasoning_effort"]} if chat.get("reasoning_effort") else {}
        template |= model.get("chat_template_kwargs") or {}
        template |= json.loads(metadata.get("chat_template_kwargs") or "{}")
        asked = {name: chat[name] for name in ("messages", "tools") if name in chat}
        return {**asked, "chat_template_kwargs": template} if template else asked

    def chat_requests(gym: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
        from nemo_gym.server_utils import ServerClient

        servers = ServerClient.load_from_global_config(gym.head_server_config).global_config_dict
        not_for_a_chat = (KeyError, TypeError, ValueError, NotImplementedError)  # or no agent of that name
        found = []
        for row in rows:
            try:
                found.append(chat_request(servers, row))
            except not_for_a_chat:
                found.append(None)
        return found

    return chat_requests

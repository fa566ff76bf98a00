# SPDX-License-Identifier: Apache-2.0
"""Tables of the methods of an engine that other processes call by name. A class for each process declares its methods.

Ray and vLLM send the name of a method to another process. Callers in this package never write that name themselves. They pass
a method of one of these classes, such as `WorkerCalls.specrollout_totals`, so that an editor finds both caller and answerer,
and the type checker compares the arguments. The class that answers derives from one of these classes and defines its methods.

Every name begins with `specrollout_`, because the methods live in classes of NeMo-RL and vLLM beside the methods of those.
"""

from collections.abc import Awaitable
from typing import Any


class WorkerCalls:
    """Calls that a vLLM worker, vLLM's process for a GPU, answers in `VllmWorkerMixin` (generation/vllm_worker.py).

    `vllm.LLM.collective_rpc` sends them to all ranks of an engine. Arguments and replies are plain values. Where a method
    says so, only the output rank gives an answer and the other ranks reply None (`transfers.is_output_rank`).
    """

    def specrollout_totals(self) -> dict[str, Any] | None:
        """Returns `EngineTotals` (telemetry/engine_stats.py) as a dict, or None on ranks other than the output rank."""
        raise NotImplementedError

    def specrollout_end_step(self, seeds: list[int] | None) -> dict[str, Any] | None:
        """Ends a training step, in which the engine also keeps what it has learned.

        Returns `StepEnd` (telemetry/sample_stats.py) as a dict, or None on ranks other than the output rank. The reply has the
        statistics of the requests with these `seeds`, or of all requests that have ended if `seeds` is None.
        """
        raise NotImplementedError

    def specrollout_take_sample_stats(self, seeds: list[int]) -> list[dict[str, Any] | None]:
        """Returns `SampleStats` as a dict for each seed, or None for a request that this engine has not decoded."""
        raise NotImplementedError

    def specrollout_take_alarms(self) -> list[dict[str, Any]]:
        """Returns the alarms since the last call, which come from the head's canary and from the files that are kept."""
        raise NotImplementedError

    def specrollout_keep_learned(self) -> None:
        """Keeps what the engine has learned, for engines that start later. Call it while no request runs.

        `specrollout_end_step` includes this, so it is needed only outside of training steps.
        """
        raise NotImplementedError

    def specrollout_weights_updated(self, seconds: float) -> None:
        """Counts a weight update, during which the engine could make no engine steps for `seconds`."""
        raise NotImplementedError

    def specrollout_policy_is(self, version: int) -> None:
        """Sets the version of the engine's weights. Each update of the weights increments it."""
        raise NotImplementedError

    def specrollout_load_head(
        self, folder: str, head_version: int | None = None, expected_length: float | None = None, num_positions: int = 3
    ) -> None:
        """Loads the head in `folder`, which drafts from now on.

        Args:
            folder: A published head.
            head_version: Policy version for which the head was trained, or None for the engine's present version.
            expected_length: Acceptance length of the head on held-out texts, if known.
            num_positions: Number of draft positions in that measurement.

        Raises ValueError for a head unlike the one that the engine was started with.
        """
        raise NotImplementedError

    def specrollout_store_features(self, place: dict[str, Any]) -> str | None:
        """Writes captured features to a store. Returns an error as text or None, because a full disk must not stop an engine.

        `place` has the arguments of `FeatureCapture.store`. This engine must be the only writer there.
        """
        raise NotImplementedError

    def specrollout_save_teacher(self, file: str) -> str | None:
        """Writes the policy's LM head and embedding to `file`. Returns an error as text, or None.

        All tensor-parallel ranks must be called.
        """
        raise NotImplementedError

    def specrollout_take_ties(self, names: list[int]) -> dict[int, tuple[int, bytes, bytes]] | None:
        """Returns those near-ties of requests, by name, that were not returned before.

        Ranks other than the output rank return None. `names` are the numbers that the requests have as `ties` in their
        identities. Each value is a tuple. It has the index of a token, counted from the beginning of the prompt, and then the
        bytes of two arrays for that token and those after it, which are the score gaps (float16) and the runners-up (int32).
        A gap is the difference in nats between the best and the second-best score including the noise, and infinite where no
        other token was possible. The last entries may belong to tokens that vLLM returns later, or drops because the request
        has ended. After a preemption, entries that were returned before may be returned again.

        A name whose request has ended is forgotten with the call, and an unknown name is left out of the result. The call
        waits for the engine steps that are running.
        """
        raise NotImplementedError

    def specrollout_forget_ties(self) -> None:
        """Forgets all near-ties up to now, of requests that have ended and of those that are running."""
        raise NotImplementedError

    def specrollout_step_seconds(self) -> tuple[list[float], float] | None:
        """Returns the predicted seconds of engine steps without drafts, and the seconds that one more draft row takes.

        The first value is a list with an entry for each number of requests, from none to as many as the engine has slots. The
        second value holds for a row of a step in which all slots are taken and have drafts. Returns None before a step was
        measured, and on ranks other than the output rank.
        """
        raise NotImplementedError

    def specrollout_drafter_stats(self) -> dict[str, Any] | None:
        """Returns `DrafterStats` (remote/protocol/drafter_stats.py) as a dict.

        Returns None without remote drafters, and on ranks other than the output rank.
        """
        raise NotImplementedError

    def specrollout_drafters_at(self, addresses: list[str], secret: str) -> None:
        """Sets the addresses of the remote drafters ("" for one that is down), and the secret that they share."""
        raise NotImplementedError


class EngineActorCalls:
    """Calls that an engine actor, NeMo-RL's Ray actor around an engine, answers (nemo_rl/engine_actors.py).

    NeMo-RL passes arguments only by name. An asynchronous engine answers some calls with a coroutine, which Ray awaits. No
    method here is `async` itself, because that would make Ray run the actors of synchronous engines on an event loop too.
    """

    def specrollout_call(self, *, method: str, arguments: list[Any]) -> Any:
        """Calls a method of `WorkerCalls` by name in all vLLM workers of the engine.

        Returns the reply of the only vLLM worker that does not reply None. Arguments and reply are plain values.
        """
        raise NotImplementedError

    def specrollout_join_exchange(self, *, actor: Any, engine: int) -> Awaitable[None] | None:
        """Joins the exchange of requests, which is the Ray actor `actor`, as engine number `engine`."""
        raise NotImplementedError

    def specrollout_plan_ahead(self, *, rows: list[Any], scale: float, kept: float) -> Awaitable[None] | None:
        """Receives the engine's share of the rows of coming steps, which it decodes in free slots.

        An earlier plan must have ended. `rows` are `EarlyRow`s (run_ahead/early_texts.py), the most urgent ones first, each
        with the text that is known of it. `scale` is how far, in nats, the next weight update is expected to move the
        difference of two scores (`FlipModel`). `kept` is the share of a text that an update has left unchanged (`EarlyTexts`).
        """
        raise NotImplementedError

    def specrollout_run_ahead(self, *, seconds: float, after: int) -> Awaitable[bool] | bool | None:
        """Decodes rows of the plan for about `seconds`, while the engine has nothing else to do.

        Returns whether any rows are left. A synchronous engine returns None and decodes nothing if fewer than `after` calls
        of `generate` have ended.
        """
        raise NotImplementedError

    def specrollout_end_ahead(self, *, keeps_cache: bool) -> Any:
        """Ends the plan and removes its rows from the engine. Returns `EarlyMade` (run_ahead/early_requests.py).

        The engine drops the prefixes that it has cached, unless `keeps_cache` is true. Without a plan the result is empty.
        """
        raise NotImplementedError

    def specrollout_texts_ahead(self, *, texts: dict[int, Any]) -> None:
        """Receives the texts that engines have made ahead for coming rows, as `TextAhead` by seed (run_ahead/texts.py)."""
        raise NotImplementedError

    def specrollout_take_kept(self) -> Any:
        """Returns how much of the texts made ahead was right since the last call, as `KeptCounts` (run_ahead/texts.py)."""
        raise NotImplementedError

    def specrollout_chat_prompts(self, *, requests: list[dict[str, Any]]) -> Awaitable[list[list[int] | None]]:
        """Returns the token ids of each chat request's prompt, as the engine's HTTP server renders it.

        A request has the field `messages` of OpenAI's chat requests, and `tools` and `chat_template_kwargs` if needed. The
        entry is None for a request that the server refuses. Only asynchronous engines have this call.
        """
        raise NotImplementedError

    def specrollout_weights_change_begins(self) -> Awaitable[None] | None:
        """Notes that a weight update begins. No request starts until it has ended."""
        raise NotImplementedError

    def specrollout_weights_change_ends(self) -> Awaitable[None] | None:
        """Notes that the weight update has ended. Later requests reuse no prefix that older weights have cached."""
        raise NotImplementedError

    def specrollout_leave_exchange(self) -> Awaitable[None]:
        """Stops the requests that came from the exchange. From now on the engine decodes only its own requests.

        Only asynchronous engines have this call.
        """
        raise NotImplementedError

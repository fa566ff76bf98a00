# SPDX-License-Identifier: Apache-2.0
"""The methods of an engine that other processes call by name: what each takes, what it replies, and who answers.

Ray and vLLM send the name of a method to another process. A caller here never writes that name itself. It passes a method of
one of these classes, such as `WorkerCalls.specrollout_totals`, so that an editor finds caller and answer, and the type
checker compares the arguments. The class that answers derives from the table, and defines every method of it.

Every name begins with `specrollout_`, because the methods live in classes of NeMo-RL and vLLM beside their own.
"""

from collections.abc import Awaitable
from typing import Any


class WorkerCalls:
    """Calls that a vLLM worker answers, which is vLLM's process for a GPU: `VllmWorkerMixin` in generation/vllm_worker.py.

    `vllm.LLM.collective_rpc` sends them to all ranks of an engine. Arguments and replies are plain values.
    """

    def specrollout_totals(self) -> dict[str, Any] | None:
        """Returns `EngineTotals` as a dict; None on a rank whose drafts are not used."""
        raise NotImplementedError

    def specrollout_end_step(self, seeds: list[int] | None) -> dict[str, Any] | None:
        """Returns `StepEnd` as a dict; None on a rank whose drafts are not used.

        Sample stats are returned for the requests of `seeds`; with None, for all requests that ended.
        """
        raise NotImplementedError

    def specrollout_take_sample_stats(self, seeds: list[int]) -> list[dict[str, Any] | None]:
        """Returns `SampleStats` as a dict for each seed; None for a request that this engine has not decoded."""
        raise NotImplementedError

    def specrollout_take_alarms(self) -> list[dict[str, Any]]:
        """Returns the alarms of the head's canary, and of the file of what was learned, since the last call."""
        raise NotImplementedError

    def specrollout_keep_learned(self) -> None:
        """Keeps what the engine has learned, for engines that start later. Call it while no request runs.

        `specrollout_end_step` does so by itself.
        """
        raise NotImplementedError

    def specrollout_weights_updated(self, seconds: float) -> None:
        """Counts a weight update that kept the engine from steps for `seconds`."""
        raise NotImplementedError

    def specrollout_policy_is(self, version: int) -> None:
        """Sets the version of the engine's weights. Each update of the weights increments it."""
        raise NotImplementedError

    def specrollout_load_head(
        self, folder: str, head_version: int | None = None, expected_length: float | None = None, num_positions: int = 3
    ) -> None:
        """Loads the head in `folder`. It drafts from now on.

        Args:
            folder: A published head.
            head_version: Version of the policy that the head was trained for; None: the engine's own.
            expected_length: Tokens a step that the head made on held-out texts, if known.
            num_positions: Draft positions of that measurement.

        Raises ValueError for a head unlike the one that the engine was started with.
        """
        raise NotImplementedError

    def specrollout_store_features(self, place: dict[str, Any]) -> str | None:
        """Writes captured features to a store. Returns the error, or None: a full disk must not stop an engine.

        `place` has the arguments of `FeatureCapture.store`. This engine must be the only writer there.
        """
        raise NotImplementedError

    def specrollout_save_teacher(self, file: str) -> str | None:
        """Writes the policy's LM head and embedding to `file`. Returns the error, or None.

        All tensor-parallel ranks must be asked.
        """
        raise NotImplementedError

    def specrollout_take_ties(self, names: list[int]) -> dict[int, tuple[int, bytes, bytes]] | None:
        """Returns the near-ties of requests by name, as far as they were not returned before.

        `names` are the numbers that the requests have as `ties` in their identities. Each value has the place of a token in
        its request, counted from the beginning of the prompt, then the gap (float16) and the runner-up (int32) of that token
        and of those after it. The gap is the difference of the best and the second-best perturbed score, in nats, and infinite
        where no other token was possible. The last of them may belong to tokens that vLLM returns later, or drops because the
        request has ended. After a preemption, the place may lie among those that were returned already.

        A name whose request has ended is forgotten with the call, and an unknown name is left out. None on a rank whose
        drafts are not used. The call waits for the steps that are under way.
        """
        raise NotImplementedError

    def specrollout_forget_ties(self) -> None:
        """Forgets the near-ties of all requests that have ended, and those so far of the others."""
        raise NotImplementedError

    def specrollout_step_seconds(self) -> tuple[list[float], float] | None:
        """Returns the predicted seconds of steps without drafts by their requests, and the seconds of one more draft row.

        The list begins with no request and ends with as many as the engine has slots. The row is one of a step in which all
        slots are taken and have drafts. None before a step was measured, and on a rank whose drafts are not used.
        """
        raise NotImplementedError

    def specrollout_drafter_stats(self) -> dict[str, Any] | None:
        """Returns `DrafterStats` as a dict; None without remote drafters, and on a rank whose drafts are not used."""
        raise NotImplementedError

    def specrollout_drafters_at(self, addresses: list[str], secret: str) -> None:
        """Sets the addresses of the remote drafters ("" for one that is down), and the secret that they share."""
        raise NotImplementedError


class EngineActorCalls:
    """Calls that an engine actor answers, which is NeMo-RL's Ray actor around an engine: nemo_rl/engine_actors.py.

    NeMo-RL sends arguments by their names only. An asynchronous engine answers some calls with a coroutine, which Ray awaits.
    Yet no method here is `async`, because one would make Ray run the actors of synchronous engines on an event loop, too.
    """

    def specrollout_call(self, *, method: str, arguments: list[Any]) -> Any:
        """Calls a method of `WorkerCalls`, by its name, in all vLLM workers of the engine.

        Returns the reply of the only rank that does not reply None. Arguments and reply are plain values.
        """
        raise NotImplementedError

    def specrollout_join_exchange(self, *, actor: Any, engine: int) -> Awaitable[None] | None:
        """Joins the exchange of requests, which is the Ray actor `actor`, as engine number `engine`."""
        raise NotImplementedError

    def specrollout_plan_ahead(self, *, rows: list[Any], scale: float, kept: float) -> Awaitable[None] | None:
        """Gets the engine's share of the rows of coming steps, which it decodes in slots that are free.

        An earlier plan must have ended. `rows` are `EarlyRow`s (run_ahead/early_texts.py), the most urgent ones first, each
        with the text that is known of it. `scale`, in nats, is how far the next update is expected to move the difference of
        two scores, and `kept` the share of a text that an update has left (`FlipModel`, `EarlyTexts`).
        """
        raise NotImplementedError

    def specrollout_run_ahead(self, *, seconds: float, after: int) -> Awaitable[bool] | bool | None:
        """Decodes rows of the plan for about `seconds`, in which the engine has nothing else to do.

        Returns whether any is left. A synchronous engine returns None, and decodes none of them, if fewer than `after` calls
        of `generate` have ended.
        """
        raise NotImplementedError

    def specrollout_end_ahead(self, *, keeps_cache: bool) -> Any:
        """Ends the plan and leaves no such row in the engine. Returns `EarlyMade` (run_ahead/early_requests.py).

        The engine drops the prefixes that it has cached, unless it `keeps_cache`. Without a plan nothing was made.
        """
        raise NotImplementedError

    def specrollout_texts_ahead(self, *, texts: dict[int, Any]) -> None:
        """Gets the texts that engines have made ahead, by seed, for the rows to come: `TextAhead` (run_ahead/texts.py)."""
        raise NotImplementedError

    def specrollout_take_kept(self) -> Any:
        """Returns how much of such texts was right since the last call: `KeptCounts` (run_ahead/texts.py)."""
        raise NotImplementedError

    def specrollout_chat_prompts(self, *, requests: list[dict[str, Any]]) -> Awaitable[list[list[int] | None]]:
        """Returns the token ids of the prompt of each chat request, as the engine's HTTP server renders it.

        A request has the fields `messages`, `tools` and `chat_template_kwargs` of OpenAI's chat requests, the latter two if
        needed. None for one that the server refuses. Only asynchronous engines have this call.
        """
        raise NotImplementedError

    def specrollout_weights_change_begins(self) -> Awaitable[None] | None:
        """Notes that a change of the weights begins. No request begins until it has ended."""
        raise NotImplementedError

    def specrollout_weights_change_ends(self) -> Awaitable[None] | None:
        """Notes that the change of the weights has ended. Requests to come read no prefix that older weights cached."""
        raise NotImplementedError

    def specrollout_leave_exchange(self) -> Awaitable[None]:
        """Stops the requests of the exchange. Only asynchronous engines have this call.

        The engine decodes its own requests alone from now on.
        """
        raise NotImplementedError

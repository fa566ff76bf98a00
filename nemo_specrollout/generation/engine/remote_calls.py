# SPDX-License-Identifier: Apache-2.0
"""Declares the methods of an engine that other processes call by name, in one class for each kind of process that answers.

Ray and vLLM send the name of a method to another process. Callers in this package never write such a name themselves. They
pass a method of one of these classes, such as `WorkerCalls.specrollout_totals`. So an editor finds both the caller and the
method that answers, and the type checker compares the arguments. The class that answers derives from one of these classes and
defines its methods.

Every name begins with `specrollout_`, because the methods are added to classes of NeMo-RL and vLLM, which have methods too.
"""

from collections.abc import Awaitable
from typing import Any


class WorkerCalls:
    """Calls that a vLLM worker, vLLM's process for a GPU, answers in `VllmWorkerMixin` (generation/vllm_worker.py).

    `vllm.LLM.collective_rpc` sends a call to all ranks of an engine. Arguments and replies are plain values. Some methods are
    answered only by the output rank, and the other ranks reply None (`transfers.is_output_rank`). Their docstrings say so.
    """

    def specrollout_totals(self) -> dict[str, Any] | None:
        """Returns `EngineTotals` (telemetry/engine_stats.py) as a dict, or None on ranks other than the output rank."""
        raise NotImplementedError

    def specrollout_end_step(self, seeds: list[int] | None) -> dict[str, Any] | None:
        """Ends a training step, and keeps what the engine has learned.

        Returns `StepEnd` (telemetry/sample_stats.py) as a dict, which contains the statistics of the requests with these
        `seeds`. If `seeds` is None, these are all requests that have ended. Ranks other than the output rank return None.
        """
        raise NotImplementedError

    def specrollout_take_sample_stats(self, seeds: list[int]) -> list[dict[str, Any] | None]:
        """Returns the statistics of the requests with these `seeds`, and forgets them.

        The list has one element for each seed, in the order of `seeds`. It is a `SampleStats` (telemetry/sample_stats.py) as a
        dict, or None if the engine has no statistics for this seed.
        """
        raise NotImplementedError

    def specrollout_take_alarms(self) -> list[dict[str, Any]]:
        """Returns the alarms of the draft head's canary, and the problems with kept files, since the last call."""
        raise NotImplementedError

    def specrollout_keep_learned(self) -> None:
        """Writes what the engine has learned to files, for engines that start later. Call it while no request runs.

        `specrollout_end_step` does this too, so a separate call is needed only outside of training steps.
        """
        raise NotImplementedError

    def specrollout_weights_updated(self, seconds: float) -> None:
        """Counts an update of the engine's weights, which kept the engine from making engine steps for `seconds`."""
        raise NotImplementedError

    def specrollout_policy_is(self, version: int) -> None:
        """Sets the policy version of the engine's weights. Each update of the weights adds 1 to it."""
        raise NotImplementedError

    def specrollout_load_head(
        self, folder: str, head_version: int | None = None, expected_length: float | None = None, num_positions: int = 3
    ) -> None:
        """Loads the draft head in `folder`, which drafts from now on.

        Args:
            folder: A published head.
            head_version: Policy version for which the head was trained, or None for the engine's present policy version.
            expected_length: Acceptance length of the head on held-out texts, or None if unknown.
            num_positions: Number of draft positions with which `expected_length` was measured.

        Raises ValueError for a head that differs in shape from the one with which the engine was started.
        """
        raise NotImplementedError

    def specrollout_store_features(self, place: dict[str, Any]) -> str | None:
        """Writes captured features to a feature store. Returns None, or the text of an error.

        The error is not raised, because a full disk must not stop an engine. `place` has the arguments of
        `FeatureCapture.store`. No other engine may write to the same place.
        """
        raise NotImplementedError

    def specrollout_save_teacher(self, file: str) -> str | None:
        """Writes the policy's LM head and embedding to `file`. Returns None, or the text of an error.

        It must be called on all tensor-parallel ranks.
        """
        raise NotImplementedError

    def specrollout_take_ties(self, names: list[int]) -> dict[int, tuple[int, bytes, bytes]] | None:
        """Returns score gaps and runners-up of the requests with these names, by name, so that near-ties can be found.

        The name of a request is the number `ties` in its identity. The value for a name is a tuple about the sampled tokens
        that no earlier call has returned. It has three elements:

        1. The index of the first of these tokens, counted from the beginning of the prompt.
        2. The bytes of an array with each token's score gap in nats, float16. It is infinite if no other token was possible.
        3. The bytes of an array with each token's runner-up, the token with the second-best score, int32.

        The last elements of the arrays may belong to tokens that vLLM returns later, or drops because the request has ended.
        After a preemption, some tokens may be returned again. If a request has ended, the call forgets its name. Unknown names
        are left out of the result. Ranks other than the output rank return None. The call waits for the engine steps that are
        running.
        """
        raise NotImplementedError

    def specrollout_forget_ties(self) -> None:
        """Forgets all near-ties up to now (`specrollout_take_ties`), both of ended requests and of running ones."""
        raise NotImplementedError

    def specrollout_step_seconds(self) -> tuple[list[float], float] | None:
        """Returns the predicted seconds of engine steps without drafts, and the seconds that one more draft row takes.

        The first value is a list. Its element n is for a step of n requests, from 0 up to the number of the engine's slots.
        The second value is for a step in which all slots are taken and have drafts. Returns None before an engine step was
        measured, and on ranks other than the output rank.
        """
        raise NotImplementedError

    def specrollout_drafter_stats(self) -> dict[str, Any] | None:
        """Returns `DrafterStats` (remote/protocol/drafter_stats.py) as a dict.

        Returns None without remote drafters, and on ranks other than the output rank.
        """
        raise NotImplementedError

    def specrollout_drafters_at(self, addresses: list[str], secret: str) -> None:
        """Sets the addresses of the remote drafters ("" for one that is down), and the secret that all of them share."""
        raise NotImplementedError


class EngineActorCalls:
    """Calls that an engine actor, NeMo-RL's Ray actor around an engine, answers (nemo_rl/engine_actors.py).

    NeMo-RL passes arguments only by name. An asynchronous engine answers some calls with a coroutine, which Ray awaits. None
    of these methods is declared `async`, because Ray would then run the actors of synchronous engines on an event loop too.
    """

    def specrollout_call(self, *, method: str, arguments: list[Any]) -> Any:
        """Calls the method of `WorkerCalls` with this name in all vLLM workers of the engine.

        Returns the reply of the only worker that does not reply None. Arguments and reply are plain values.
        """
        raise NotImplementedError

    def specrollout_join_exchange(self, *, actor: Any, engine: int) -> Awaitable[None] | None:
        """Lets the engine hand requests over to other engines and take theirs, as engine number `engine`.

        The Ray actor `actor` is the exchange, through which the engines do this.
        """
        raise NotImplementedError

    def specrollout_plan_ahead(self, *, rows: list[Any], scale: float, kept: float) -> Awaitable[None] | None:
        """Gives the engine its share of the rows of coming training steps, which it decodes in free slots.

        Call `specrollout_end_ahead` before the next plan. `rows` are `EarlyRow`s (run_ahead/early_texts.py), the most urgent
        ones first. Each has the part of its text that is known already. `scale` tells by how many nats the next weight update
        is expected to move the difference of two scores (`FlipModel`). `kept` is the share of a text that a weight update has
        left unchanged so far (`EarlyTexts`).
        """
        raise NotImplementedError

    def specrollout_run_ahead(self, *, seconds: float, after: int) -> Awaitable[bool] | bool | None:
        """Decodes the rows of coming training steps for about `seconds`, while the engine has nothing else to do.

        The rows are those that `specrollout_plan_ahead` has brought. Returns whether any of them are left to decode.

        `after` is the number of calls of `generate` that must have ended before. If fewer have ended, a synchronous engine
        decodes nothing and returns None.
        """
        raise NotImplementedError

    def specrollout_end_ahead(self, *, keeps_cache: bool) -> Any:
        """Removes the rows of coming training steps from the engine, and returns the texts that it has made for them.

        The result is an `EarlyMade` (run_ahead/early_requests.py), which is empty if `specrollout_plan_ahead` brought no rows.
        The engine also drops all prefixes that it has cached, unless `keeps_cache` is true.
        """
        raise NotImplementedError

    def specrollout_texts_ahead(self, *, texts: dict[int, Any]) -> None:
        """Gives the engine the texts made ahead for rows that it will decode.

        `texts` has a `TextAhead` (run_ahead/texts.py) for the seed of each row.
        """
        raise NotImplementedError

    def specrollout_take_kept(self) -> Any:
        """Returns how much of the texts made ahead was right since the last call, as `KeptCounts` (run_ahead/texts.py)."""
        raise NotImplementedError

    def specrollout_chat_prompts(self, *, requests: list[dict[str, Any]]) -> Awaitable[list[list[int] | None]]:
        """Returns the token ids of the prompt of each chat request, as the engine's HTTP server renders it.

        A request has the field `messages` of OpenAI's chat requests, and `tools` and `chat_template_kwargs` if needed. Instead
        of token ids, the list has None for a request that the server refuses. Only asynchronous engines have this call.
        """
        raise NotImplementedError

    def specrollout_weights_change_begins(self) -> Awaitable[None] | None:
        """Notes that a weight update begins. The engine starts no request until the update has ended."""
        raise NotImplementedError

    def specrollout_weights_change_ends(self) -> Awaitable[None] | None:
        """Notes that the weight update has ended. Requests from now on reuse no prefix that older weights have cached."""
        raise NotImplementedError

    def specrollout_leave_exchange(self) -> Awaitable[None]:
        """Stops the requests that came from other engines. From now on the engine decodes only its own requests.

        Only asynchronous engines have this call.
        """
        raise NotImplementedError

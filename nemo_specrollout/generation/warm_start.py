# SPDX-License-Identifier: Apache-2.0
"""The warm start of an engine, which takes over acceptance rates and step times that a similar engine has kept in a file.

What is read can only change how much is drafted, and never a token. So it is safe to use any file that fits.

Shapes: E kinds of evidence.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import DrafterConfig, LookupDrafterConfig
from nemo_specrollout.generation.drafting.draft_router import DraftRouter
from nemo_specrollout.generation.engine import compat
from nemo_specrollout.generation.engine.arguments import DRAFT_ROWS
from nemo_specrollout.generation.engine.transfers import agreed, is_output_rank
from nemo_specrollout.generation.step.step_accounts import StepAccounts
from nemo_specrollout.installed.versions import this_machine
from nemo_specrollout.learned.kept_file import Found, KeptFile
from nemo_specrollout.learned.state import LARGEST, Unfit, begin_with, state_of
from nemo_specrollout.learned.weights import weights_digest
from nemo_specrollout.speculation.foresight import Foresight

KIND = "engine"
"""Prefix of the names of the files in which engines keep what they have learned."""
_ROUNDING = 1e-3
"""Accepted draft tokens may exceed judged ones by this share, because both numbers are sums that decay and are rounded."""


@dataclass(frozen=True)
class Learning:
    """The parts of an engine that learn from its engine steps."""

    router: DraftRouter
    accounts: StepAccounts
    foresight: Foresight | None
    """Predicts on the host which drafts are accepted. None if the device chooses the drafts of an engine step."""


class WarmStart:
    """Owns the file in which an engine keeps acceptance rates and step times, and what was read from it.

    `begin` reads the file before the first engine step. The first tensor-parallel rank sends what it has read to the others,
    so that all ranks begin alike. `keep` writes the file between two training steps, on the output rank.
    """

    def __init__(self, config: SpecrolloutConfig, runner: Any, learning: Learning) -> None:
        self._learning = learning
        self._policy_class = type(learning.router.policy)
        model_drafter = config.model_drafter
        self._weights = (
            "" if model_drafter is None else weights_digest(getattr(model_drafter, "model", model_drafter.type))
        )
        """Digest of the weights that the engine's drafter with weights has now."""
        self._file: KeptFile | None = None
        """The engine's file, or None if the engine keeps nothing."""
        folder = config.learned.folder
        if config.learned.warm_start and folder is not None:
            self._file = KeptFile(Path(folder), KIND, engine_key(config, runner, learning.router))
        self._found = Found(reason="nothing is kept")
        self._num_kept = 0
        """Number of engine steps that this engine had made when it last wrote its file."""

    @property
    def sentence(self) -> str | None:
        """A sentence that tells the user what the engine took over. None if it keeps nothing or if there was no file yet."""
        found = self._found
        if self._file is None or not found.is_told:
            return None
        if found.state is None:
            return f"began without earlier rates and step times, because {found.reason}"
        return f"began with the rates and step times of {found.saved} after {found.num_steps:,} steps"

    def begin(self) -> None:
        """Reads the engine's file, if there is one that fits this engine, and lets the engine take over the content."""
        if self._file is None:
            return
        self._found = agreed(self._file.read() if is_output_rank() else None)
        if self._found.state is None:
            return
        try:
            self._apply(self._found.state)
        except ValueError as error:
            self._found = self._file.unfit(str(error))

    def loaded_head(self, folder: Path) -> None:
        """Notes that the draft head now has the weights in `folder`.

        If the engine's file was written with these weights and no engine step was made yet, the engine takes over the content
        of the file once more. This time it includes what the file says about the head.
        """
        self._weights = agreed(weights_digest(folder))
        found = self._found
        is_about_it = found.state is not None and found.state.get("weights") == self._weights
        if is_about_it and self._learning.accounts.trace.num_steps == 0:
            self._apply(found.state)

    def keep(self) -> None:
        """Starts a thread that writes what the engine has learned to its file, unless it was written a short time ago.

        Call it while the engine decodes no request.
        """
        file = self._file
        num_steps = self._learning.accounts.trace.num_steps
        has_learned = num_steps > self._num_kept and type(self._learning.router.policy) is self._policy_class
        if file is None or not has_learned or not is_output_rank() or not file.is_due:
            return
        self._num_kept = num_steps
        file.keep(self._state(), self._found.num_steps + num_steps)

    def settle(self) -> None:
        """Waits until everything that `keep` has begun to write is on the disk."""
        if self._file is not None:
            self._file.settle()

    def take_alarms(self) -> list[dict[str, Any]]:
        """Returns the problem with the engine's file since the last call, as a list of at most one dict."""
        problem = None if self._file is None else self._file.take_problem()
        return [] if problem is None else [{"sentence": problem}]

    def _state(self) -> dict[str, Any]:
        router = self._learning.router
        board = router.board
        tables = {name: board.learned(drafter) for drafter, name in enumerate(board.names)}
        foresight = self._learning.foresight
        return {
            "step_model": state_of(self._learning.accounts.step_model),
            "policy": state_of(router.policy),
            "foresight": None if foresight is None else state_of(foresight),
            "drafters": {name: {table: values.tolist() for table, values in of.items()} for name, of in tables.items()},
            "weights": self._weights,
        }

    def _apply(self, state: Any) -> None:
        """Lets all parts of the engine take over a `state` from a file.

        Raises ValueError if a part of the state does not fit. Then no part of the engine has changed.
        """
        learning = self._learning
        policy = learning.router.policy
        board = learning.router.board
        if not isinstance(state, Mapping) or not isinstance(state.get("drafters"), Mapping):
            raise Unfit("it is no state of an engine")
        tables = [_tables_of(state["drafters"].get(name), board.learned(i)) for i, name in enumerate(board.names)]
        parts = [(learning.accounts.step_model, state.get("step_model")), (policy, state.get("policy"))]
        if learning.foresight is not None and state.get("foresight") is not None:
            parts.append((learning.foresight, state["foresight"]))
        begin_with(parts)
        is_about_weights = state.get("weights") == self._weights
        for drafter, learned in enumerate(tables):
            if drafter != board.model or is_about_weights:
                board.begin_with(drafter, learned)
        costs = agreed(learning.accounts.step_model.costs())
        policy.costs = costs
        if (
            not is_about_weights or costs is None or costs.drafting is None
        ):  # nothing is known of the drafter with weights
            policy.model_changed()


def _tables_of(state: Any, now: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the draft board's tables about one drafter from a file's `state`, float64 arrays by name.

    `now` has the present tables of the same drafter. Raises Unfit if the file's tables have other names or shapes than these,
    or have impossible numbers, such as a negative count.
    """
    if not isinstance(state, Mapping) or set(state) != set(now):
        raise Unfit("a drafter has other tables")
    found = {}
    for name, table in now.items():
        try:
            values = np.asarray(state[name], np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            raise Unfit(f"{name} is no table of numbers") from error
        second = values[..., 1:]
        is_sound = values.shape == table.shape and bool((np.abs(values) <= LARGEST).all() and (second >= 0.0).all())
        if is_sound and name != "factor_weight_2":  # all others have hits first, then trials or predicted hits
            is_sound = bool((values >= 0.0).all())
        if is_sound and name == "evidence_E2":
            hits = values[..., :1]
            is_sound = bool((second > 0.0).all() and (hits <= (1.0 + _ROUNDING) * second).all())
        if not is_sound:
            raise Unfit(f"{name} has no rates")
        found[name] = values
    return found


def engine_key(config: SpecrolloutConfig, runner: Any, router: DraftRouter) -> dict[str, Any]:
    """Returns the properties that two engines must share so that one can take over the rates and step times of the other."""
    vllm_config = runner.vllm_config
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    compilation = vllm_config.compilation_config
    return {
        "model": str(model.model),
        "config": _digest(model.hf_config),
        "types": [str(model.dtype), str(model.quantization), str(vllm_config.cache_config.cache_dtype)],
        "vllm": compat.VLLM_VERSION,
        "device": _device_name(runner.device),
        "parallel": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
        "drafters": [_drafter_key(drafter) for drafter in config.drafters],
        "policy": type(router.policy).__name__,
        "slots": runner.max_num_reqs,
        "positions": [router.board.num_positions, config.num_speculative_tokens],
        "tokens": runner.max_num_tokens,
        "draft_rows": vllm_config.additional_config.get(DRAFT_ROWS),
        "graphs": [str(compilation.cudagraph_mode), list(compilation.cudagraph_capture_sizes or ())],
    }


def _drafter_key(drafter: DrafterConfig) -> dict[str, Any]:
    """Returns the options of a drafter on which rates and step times depend.

    The weights of a drafter in the engine are not among them. They are compared separately, because a run may train them.
    """
    known: dict[str, Any] = {"type": drafter.type, "sampling": getattr(drafter, "sampling", None)}
    if isinstance(drafter, LookupDrafterConfig):
        known |= {"max_order": drafter.max_order, "num_slots": drafter.num_slots}
    elif drafter.type == "remote":
        known["weights"] = weights_digest(getattr(drafter, "model", ""))
    return known


def _digest(config: Any) -> str:
    """Returns a SHA-256 digest of a model's configuration."""
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True, default=str).encode()).hexdigest()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{this_machine()}, {torch.get_num_threads()} threads"

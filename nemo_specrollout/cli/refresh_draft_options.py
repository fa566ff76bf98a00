# SPDX-License-Identifier: Apache-2.0
"""What may be asked of `nemo-specrollout refresh-draft`: its flags, their defaults, and which go together. Torch-free."""

import argparse
import dataclasses
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_specrollout.config.draft_refresh import MIXED_LOSS
from nemo_specrollout.config.strict import ConfigError, bounded, build

DEFAULT_MINUTES = 10.0


def _flag(text: str, metavar: str, default: Any = dataclasses.MISSING, **bounds: float) -> Any:
    """A field that is a flag of the same name."""
    made = bounded(default, **bounds)
    return dataclasses.field(default=default, metadata={**made.metadata, "help": text, "metavar": metavar})


@dataclass(frozen=True)
class RefreshOptions:
    """The flags, by name. None: not given, see the help text for what is done then."""

    policy: str = _flag("the policy: Hugging Face folder, Megatron checkpoint, or NeMo-RL step folder", "CKPT")
    out: str = _flag("folder of the new head; vLLM serves it as it is", "DIR")
    draft: str | None = _flag(
        "begin with this head and replace it only by a better one; else from scratch", "DIR", None
    )
    rollouts: tuple[str, ...] = _flag(
        "JSONL files, folders of them (NeMo-RL's logs too), or a feature store", "PATH", ()
    )
    prompts: str | None = _flag(
        "without --rollouts: prompts that the policy answers itself, or a config of the local runner, whose tasks make them",
        "FILE",
        None,
    )
    num_prompts: int = _flag("of --prompts CONFIG: prompts, of its bench.workloads or else its data", "N", 256, low=16)
    samples_per_prompt: int = _flag("of --prompts: responses to each", "N", 4, low=1)
    max_new_tokens: int = _flag("of --prompts: longest response", "N", 512, low=1)
    rollout_dtype: str = _flag("of --prompts: the engine's dtype, float32 or bfloat16", "NAME", "float32")
    hf_config: str | None = _flag("config and tokenizer of a Megatron checkpoint that does not name them", "DIR", None)
    layer_ids: tuple[int, ...] = _flag(
        "layers whose inputs a new head reads, e.g. 2,18,33; else early, middle, late", "IDS", ()
    )
    draft_vocab: int | None = _flag("a new head drafts only the N most frequent tokens; else all", "N", None, low=1)
    steps: int | None = _flag("optimizer steps; makes the result repeatable", "N", None, low=1)
    minutes: float | None = _flag(
        f"minutes of training; {DEFAULT_MINUTES:g} where --steps is not given", "M", None, above=0.0
    )
    loss: str = _flag(
        "a loss of speculators: nla, kl_div, tv, lk_hybrid, or JSON of several with weights", "NAME", MIXED_LOSS
    )
    tv_after: float = _flag(
        "share of the training after which the loss is total variation alone; 1 is never", "X", 1.0, low=0.0, high=1.0
    )
    lr: float | None = _flag(
        "learning rate; else 3e-3 up to hidden size 256, falling to 1e-4 at 4096", "X", None, above=0.0
    )
    batch_tokens: int | None = _flag("tokens of an optimizer step; else 256 on a CPU, 4096 on a GPU", "N", None, low=8)
    ttt_steps: int = _flag("draft positions that are trained", "N", 5, low=1, high=16)
    temperature: float = _flag("of the rollouts that the head is for", "T", 1.0, low=0.0)
    num_drafts: int = _flag("draft tokens of a step, by which heads are judged", "K", 3, low=1, high=16)
    confidence: float = _flag("of the gate, that the new head is not worse", "C", 0.95, low=0.5, below=1.0)
    tolerance: float = _flag("by how much acceptance length may be worse and still pass", "X", 0.0, low=0.0)
    held_out_share: float = _flag(
        "share of prompts kept to judge by, 8 prompts at least", "X", 0.1, above=0.0, below=1.0
    )
    max_length: int | None = _flag("longest text in tokens; else the policy's context", "N", None, low=8)
    store_gb: float = _flag(
        "most disk space, and memory, of features; the first rollouts are left out", "G", 8.0, above=0.0
    )
    dtype: str = _flag("of the saved head: float32 or bfloat16", "NAME", "float32")
    seed: int = _flag(
        "of the new head, the order of its data, and the rollouts of --prompts", "N", 0, low=0, high=2**32 - 1
    )
    policy_version: int = _flag("for the head's card: the step of the policy", "N", 0, low=0)
    device: str = _flag("auto, cpu or cuda", "NAME", "auto")
    replace: bool = _flag("put the new head in the place of one that is at --out", "", False)
    restart: bool = _flag("throw away what an earlier, unfinished command left in DIR.partial", "", False)
    keep_features: bool = _flag("keep the features in DIR.features, for --rollouts of another refresh", "", False)

    @property
    def out_path(self) -> Path:
        return Path(self.out)

    @property
    def recorded(self) -> dict[str, Any]:
        """What must be the same for a refresh to go on."""
        may_differ = ("device", "replace", "restart", "keep_features")
        return {name: value for name, value in asdict(self).items() if name not in may_differ}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags; the defaults stay in the dataclass."""
    for field in dataclasses.fields(RefreshOptions):
        facts, kind = field.metadata, str(field.type)
        flag, text = f"--{field.name.replace('_', '-')}", facts["help"]
        if "bool" in kind:
            parser.add_argument(flag, action="store_true", help=text)
            continue
        required = field.default is dataclasses.MISSING
        if not required and field.default not in (None, ()):
            text += f" (default {field.default})"
        several: dict[str, Any] = {"nargs": "+"} if field.name == "rollouts" else {}
        parser.add_argument(flag, metavar=facts["metavar"], required=required, help=text.replace("%", "%%"), **several)


def options_of(parsed: argparse.Namespace) -> RefreshOptions:
    """The flags as a record. Raises ConfigError that names flag, value and fix."""
    names = {f.name: str(f.type) for f in dataclasses.fields(RefreshOptions)}
    values = {n: _value(n, kind, getattr(parsed, n)) for n, kind in names.items() if getattr(parsed, n) is not None}
    try:
        options = build(RefreshOptions, values, "")
    except ConfigError as error:
        name, _, rest = str(error).partition(":")
        raise ConfigError(f"--{name.replace('_', '-')}:{rest}") from error
    _check(options)
    return options


def _value(name: str, kind: str, given: Any) -> Any:
    """A flag's text as its field's type; `build` refuses what stays text."""
    if name == "layer_ids":
        given = given.split(",")
        return [int(i) if i.strip().lstrip("-").isdigit() else i for i in given]
    if "int" in kind and isinstance(given, str):
        return int(given) if given.lstrip("-").isdigit() else given
    return given


def _check(options: RefreshOptions) -> None:
    if not options.rollouts and options.prompts is None:
        raise ConfigError("nothing to learn from; give --rollouts PATH, or --prompts FILE that the policy will answer")
    if options.rollouts and options.prompts is not None:
        raise ConfigError("--rollouts and --prompts are both given; leave out one of them")
    if options.steps is not None and options.minutes is not None:
        raise ConfigError("--steps and --minutes are both given; leave out one of them")
    if options.draft is not None and options.draft_vocab is not None:
        raise ConfigError("--draft-vocab is a new head's, and --draft has one of its own; leave out one of them")
    if options.draft is not None and options.layer_ids:
        raise ConfigError("--layer-ids are a new head's, and --draft has its own; leave out one of them")
    if options.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device: {options.device!r} is not available; choose auto, cpu or cuda")
    for flag, dtype in (("--dtype", options.dtype), ("--rollout-dtype", options.rollout_dtype)):
        if dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"{flag}: {dtype!r} is not available; choose float32 or bfloat16")

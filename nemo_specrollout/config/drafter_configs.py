# SPDX-License-Identifier: Apache-2.0
"""Options of the drafters, with a frozen dataclass for each `type` in the block's `drafters`, and remote drafters' secret."""

import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_specrollout.config.addresses import check_addresses, check_allowed_hosts, is_loopback
from nemo_specrollout.config.strict import ConfigError, bounded, choice, raise_first_mistake, required

DRAFT_SAMPLING = ("shared_noise", "greedy")

SECRET_VARIABLE = "NEMO_SPECROLLOUT_SECRET"
_SHORTEST_SECRET = 16
_OF_A_CHECKPOINT = ("config.json", "model.safetensors", "model.safetensors.index.json")


def shared_secret(addresses: Iterable[str]) -> bytes:
    """Returns the key for drafters at `addresses`, which is made from the secret in the environment.

    The key may be empty if only this machine can reach the addresses. Raises ConfigError if other machines can reach one, and
    the secret is missing or has fewer than 16 characters.
    """
    secret = os.environ.get(SECRET_VARIABLE, "")
    if len(secret) < _SHORTEST_SECRET and not all(map(is_loopback, addresses)):
        need = f"drafters that other machines can reach need a shared secret of at least {_SHORTEST_SECRET} characters"
        raise ConfigError(f"{SECRET_VARIABLE}: {need} in the environment of both ends")
    return as_key(secret)


def as_key(secret: str) -> bytes:
    """Returns the first 64 bytes of a secret, as the key that protects messages.

    Bytes that are not UTF-8, which an environment variable may have, come back as they were.
    """
    return os.fsencode(secret)[:64]


def secret_of_run() -> str:
    """Returns the secret for drafters that a run starts, which is the environment's, or else a random one.

    Raises ConfigError if the environment's secret is too short.
    """
    secret = os.environ.get(SECRET_VARIABLE, "")
    if secret and len(secret) < _SHORTEST_SECRET:
        fix = f"give it at least {_SHORTEST_SECRET} characters, or remove it: the run then makes a secret of its own"
        raise ConfigError(f"{SECRET_VARIABLE}: too short; {fix}")
    return secret or secrets.token_hex(32)


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Base of all drafters' options."""

    type: str
    """The draft method, a key of `DRAFTERS`."""


@dataclass(frozen=True, kw_only=True)
class TextDrafterConfig(DrafterConfig):
    """Base of the drafters without weights."""


@dataclass(frozen=True, kw_only=True)
class RandomDrafterConfig(TextDrafterConfig):
    """`random`: drafts random tokens, which are always wrong. It is for measuring the worst case."""

    type: str = choice("random", default="random")


@dataclass(frozen=True, kw_only=True)
class LookupDrafterConfig(TextDrafterConfig):
    """Base of the drafters that look up a continuation of the latest tokens in earlier text."""

    max_order: int = bounded(6, low=2, high=16)
    """The longest context, in tokens, by which a continuation is looked up."""
    num_slots: int | None = bounded(None, low=1 << 10, high=1 << 26)
    """How many contexts the index remembers, a power of two. Each takes 40 bytes, and the least used make room for new
    ones. `null` derives it from the number and length of the requests, so that the index takes at most 640 MiB."""

    def check(self, path: str) -> None:
        """Raises ConfigError if `num_slots` is not a power of two."""
        slots = self.num_slots or 1
        text = f"{slots} is not a power of two; the next is {1 << slots.bit_length()}"
        raise_first_mistake(path, (slots & (slots - 1), "num_slots", text))


@dataclass(frozen=True, kw_only=True)
class SuffixDrafterConfig(LookupDrafterConfig):
    """`suffix`: looks up how the latest tokens went on in other samples of the same prompt and in past rollouts."""

    type: str = choice("suffix", default="suffix")


@dataclass(frozen=True, kw_only=True)
class NgramDrafterConfig(LookupDrafterConfig):
    """`ngram`: looks up how the latest tokens went on earlier in the request's own text."""

    type: str = choice("ngram", default="ngram")


@dataclass(frozen=True, kw_only=True)
class HistoryDrafterConfig(LookupDrafterConfig):
    """`history`: looks up finished responses to the same prompt, of all engines and earlier starts.

    The option `learned.history` adds it to a block with `suffix`.
    """

    type: str = choice("history", default="history")


@dataclass(frozen=True, kw_only=True)
class AheadDrafterConfig(TextDrafterConfig):
    """`ahead`: drafts the text that older weights have made ahead for the request. The option `run_ahead` adds it."""

    type: str = choice("ahead", default="ahead")


@dataclass(frozen=True, kw_only=True)
class ModelDrafterConfig(DrafterConfig):
    """Base of the drafters with weights that run inside the policy's engine, as vLLM's own speculator."""

    sampling: str = choice(*DRAFT_SAMPLING, default="shared_noise")
    """How drafts are drawn. `shared_noise` samples the drafter's distribution with the request's own noise. `greedy` takes
    the most likely tokens."""


@dataclass(frozen=True, kw_only=True)
class MtpDrafterConfig(ModelDrafterConfig):
    """`mtp`: drafts with the policy's own multi-token prediction heads, whose weights must be in the policy's folder."""

    type: str = choice("mtp", default="mtp")


@dataclass(frozen=True, kw_only=True)
class FolderDrafterConfig(ModelDrafterConfig):
    """Base of the drafters whose weights are in a folder of their own."""

    model: str = required("name the folder of its weights")
    """The folder of the weights."""


@dataclass(frozen=True, kw_only=True)
class Eagle3DrafterConfig(FolderDrafterConfig):
    """`eagle3`: drafts with a draft head, which reads the policy's hidden states."""

    type: str = choice("eagle3", default="eagle3")


@dataclass(frozen=True, kw_only=True)
class DraftModelDrafterConfig(FolderDrafterConfig):
    """`draft_model`: drafts with a small language model in the policy's engine. Its tokenizer must be the policy's."""

    type: str = choice("draft_model", default="draft_model")


@dataclass(frozen=True, kw_only=True)
class BlockDrafterConfig(FolderDrafterConfig):
    """Base of the heads that draft all of a request's tokens for an engine step, called a block, in one pass."""


@dataclass(frozen=True, kw_only=True)
class DflashDrafterConfig(BlockDrafterConfig):
    """`dflash`: drafts a block of tokens in one pass, each of them independently of the others."""

    type: str = choice("dflash", default="dflash")


@dataclass(frozen=True, kw_only=True)
class DsparkDrafterConfig(BlockDrafterConfig):
    """`dspark`: drafts a block of tokens in one pass, each of them depending on the one before."""

    type: str = choice("dspark", default="dspark")


@dataclass(frozen=True, kw_only=True)
class RemoteDrafterConfig(DrafterConfig):
    """`remote`: drafts with a small model in an engine of its own, which runs ahead while the policy's engine verifies."""

    type: str = choice("remote", default="remote")
    model: str = required("name the folder of its weights")
    """The folder of the small model."""
    weights_from: str | None = None
    """A folder to which the draft model's trainer publishes weights. Drafters load its newest subfolder when they start,
    and while they draft. With `null`, they keep the weights of `model` until `publish-draft` brings others."""
    sampling: str = choice(*DRAFT_SAMPLING, default="shared_noise")
    """How drafts are drawn, as for the drafters in the policy's engine."""
    workers: int = bounded(0, low=0, high=64)
    """Drafter processes that the run starts and supervises, in NeMo-RL through Ray. Leave it at 0 with `addresses`."""
    addresses: tuple[str, ...] = ()
    """Addresses of drafters that `serve-drafter` started, such as `tcp://10.0.0.7:5570`."""
    gpus: float = bounded(0.0, low=0.0, high=1.0)
    """GPUs of each drafter that NeMo-RL starts, beside the GPUs of `cluster`. With 0.5 two drafters share one, and with 0
    they run on a CPU."""
    most_ahead: int = bounded(24, low=1, high=64)
    """The most draft tokens by which a drafter may be ahead of a request's committed text. With less than twice
    `num_speculative_tokens`, drafters have to wait."""
    max_requests: int = bounded(256, low=1, high=4096)
    """The most requests that one drafter process serves at the same time, counted over all engines."""
    allowed_hosts: tuple[str, ...] = ()
    """IP addresses, networks and names of the hosts that may ask for drafts. A drafter looks names up when it starts. An
    empty list allows every host that knows the secret."""
    vllm_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the drafter's own vLLM engine, such as `gpu_memory_utilization`."""
    placement: str = choice("as_written", "auto", default="as_written")
    """Where drafts are made. `as_written` takes the config as it is. `auto` is for local runs with `workers`, and drafts
    beside the policy's engine, inside it or not at all, whichever is fastest by the times in `profile`."""
    profile: str | None = None
    """For `placement: auto`, the file that `specrollout-lab profile` wrote on this machine."""
    acceptance: float = bounded(0.8, low=0.0, high=1.0)
    """For `placement: auto`, the expected probability that a draft token is accepted if all before it were."""

    def check(self, path: str) -> None:
        """Raises ConfigError if options contradict each other, or an address or a host cannot be used."""
        raise_first_mistake(
            path,
            (
                bool(self.workers) == bool(self.addresses),
                "",
                f"workers {self.workers} and addresses {list(self.addresses)}; "
                "set either the number of drafters that the run starts, or the addresses of running drafters",
            ),
            (
                self.gpus and not self.workers,
                "gpus",
                f"{self.gpus}; drafters at addresses use the device that "
                "`serve-drafter` found: remove it, or set workers",
            ),
            (
                self.placement == "auto" and not (self.workers and self.profile),
                "placement",
                f"'auto' with workers {self.workers} and profile {self.profile}; it needs workers of 1 or more, and the file "
                "that `specrollout-lab profile` wrote",
            ),
        )
        self._check_weights_from(path)
        check_addresses(f"{path}.addresses", self.addresses)
        check_allowed_hosts(f"{path}.allowed_hosts", self.allowed_hosts)

    def _check_weights_from(self, path: str) -> None:
        """Raises ConfigError if `weights_from` cannot be a folder to which weights are published.

        The folder need not exist yet.
        """
        named = self.weights_from
        if named is None:
            return
        folder = Path(named)
        can_be_a_path = bool(named.strip()) and "\0" not in named
        is_checkpoint = can_be_a_path and any((folder / name).is_file() for name in _OF_A_CHECKPOINT)
        raise_first_mistake(
            path,
            (
                not can_be_a_path,
                "weights_from",
                f"{named!r} is no path; name the folder that weights are published to, or remove it",
            ),
            (
                can_be_a_path and folder.exists() and not folder.is_dir(),
                "weights_from",
                f"{named!r} is not a folder; name the one that weights are published to",
            ),
            (
                is_checkpoint or (can_be_a_path and folder.absolute() == Path(self.model).absolute()),
                "weights_from",
                f"{named!r} is a checkpoint itself; name a folder with a subfolder for each checkpoint, such as version_1",
            ),
        )


DRAFTERS: dict[str, type[DrafterConfig]] = {
    cls.type: cls
    for cls in (
        SuffixDrafterConfig,
        NgramDrafterConfig,
        HistoryDrafterConfig,
        Eagle3DrafterConfig,
        DraftModelDrafterConfig,
        MtpDrafterConfig,
        DflashDrafterConfig,
        DsparkDrafterConfig,
        RemoteDrafterConfig,
        AheadDrafterConfig,
        RandomDrafterConfig,
    )
}
"""The class of each `type`, in the order in which docs/reference/block.md lists them."""


def _types_of(base: type[DrafterConfig]) -> tuple[str, ...]:
    return tuple(name for name, cls in DRAFTERS.items() if issubclass(cls, base))


MODEL_DRAFTERS = _types_of(ModelDrafterConfig)
BLOCK_DRAFTERS = _types_of(BlockDrafterConfig)
REMOTE_DRAFTER = RemoteDrafterConfig.type

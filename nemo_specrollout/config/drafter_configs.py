# SPDX-License-Identifier: Apache-2.0
"""Options of the drafters, with a frozen dataclass for each `type` of drafter, and the secret that remote drafters share."""

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
    """Returns the key that protects messages to remote drafters at `addresses`.

    The key is made from the secret in the environment variable NEMO_SPECROLLOUT_SECRET. If other machines can reach one of the
    addresses, raises ConfigError unless the secret has at least 16 characters. If only this machine can reach them, any secret
    will do, and without a secret the key is empty.
    """
    secret = os.environ.get(SECRET_VARIABLE, "")
    if len(secret) < _SHORTEST_SECRET and not all(map(is_loopback, addresses)):
        need = f"drafters that other machines can reach need a shared secret of at least {_SHORTEST_SECRET} characters"
        raise ConfigError(f"{SECRET_VARIABLE}: {need} in the environment of both ends")
    return as_key(secret)


def as_key(secret: str) -> bytes:
    """Returns the key that protects messages to remote drafters, which is the first 64 bytes of `secret`.

    An environment variable may have bytes that are not UTF-8. Python represents them by surrogates, and this function restores
    the bytes.
    """
    return os.fsencode(secret)[:64]


def secret_of_run() -> str:
    """Returns the secret for the remote drafters that a run starts. It is NEMO_SPECROLLOUT_SECRET if set, or else random.

    Raises ConfigError if NEMO_SPECROLLOUT_SECRET is too short.
    """
    secret = os.environ.get(SECRET_VARIABLE, "")
    if secret and len(secret) < _SHORTEST_SECRET:
        fix = f"give it at least {_SHORTEST_SECRET} characters, or remove it: the run then makes a secret of its own"
        raise ConfigError(f"{SECRET_VARIABLE}: too short; {fix}")
    return secret or secrets.token_hex(32)


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Base class of the options of all drafters."""

    type: str
    """The kind of drafter, which is a key of `DRAFTERS`."""


@dataclass(frozen=True, kw_only=True)
class TextDrafterConfig(DrafterConfig):
    """Base class of the options of drafters without weights, which find their draft tokens in texts."""


@dataclass(frozen=True, kw_only=True)
class RandomDrafterConfig(TextDrafterConfig):
    """`random`: drafts random tokens, which are practically never accepted. It is for measuring the worst case."""

    type: str = choice("random", default="random")


@dataclass(frozen=True, kw_only=True)
class LookupDrafterConfig(TextDrafterConfig):
    """Base class of the options of drafters that find a request's last tokens in a text, and draft what follows them there."""

    max_order: int = bounded(6, low=2, high=16)
    """The most tokens at the end of a request's text that the drafter looks up. The tokens that it looks up are called a
    context."""
    num_slots: int | None = bounded(None, low=1 << 10, high=1 << 26)
    """How many contexts the drafter's index remembers. It must be a power of two. Each context takes 40 bytes. If the index is
    full, it forgets the contexts that were used least. With `null`, the index is large enough for requests of full length
    in all slots, but takes at most 640 MiB."""

    def check(self, path: str) -> None:
        """Raises ConfigError if `num_slots` is not a power of two."""
        slots = self.num_slots or 1
        text = f"{slots} is not a power of two; the next is {1 << slots.bit_length()}"
        raise_first_mistake(path, (slots & (slots - 1), "num_slots", text))


@dataclass(frozen=True, kw_only=True)
class SuffixDrafterConfig(LookupDrafterConfig):
    """`suffix`: finds a request's last tokens in other samples of the same prompt, and drafts what follows them there.

    Samples of the prompt in past rollouts count as well.
    """

    type: str = choice("suffix", default="suffix")


@dataclass(frozen=True, kw_only=True)
class NgramDrafterConfig(LookupDrafterConfig):
    """`ngram`: finds a request's last tokens earlier in the request's own text, and drafts what followed them there."""

    type: str = choice("ngram", default="ngram")


@dataclass(frozen=True, kw_only=True)
class HistoryDrafterConfig(LookupDrafterConfig):
    """`history`: finds a request's last tokens in finished responses to the same prompt, and drafts what followed them there.

    The responses are from all engines and earlier starts. If `learned.history` is on, this drafter is added to each block that
    names `suffix`.
    """

    type: str = choice("history", default="history")


@dataclass(frozen=True, kw_only=True)
class AheadDrafterConfig(TextDrafterConfig):
    """`ahead`: drafts the text that an engine has decoded early for the request, with older weights. `run_ahead` adds it."""

    type: str = choice("ahead", default="ahead")


@dataclass(frozen=True, kw_only=True)
class ModelDrafterConfig(DrafterConfig):
    """Base class of the options of drafters with weights that run inside the policy's engine, as a speculator of vLLM."""

    sampling: str = choice(*DRAFT_SAMPLING, default="shared_noise")
    """How the drafter chooses draft tokens. `shared_noise` samples its distribution with the Gumbel noise that the policy will
    use, so that both often sample the same token. `greedy` takes the most likely tokens."""


@dataclass(frozen=True, kw_only=True)
class MtpDrafterConfig(ModelDrafterConfig):
    """`mtp`: drafts with the policy's own heads for multi-token prediction. Their weights must be in the policy's folder."""

    type: str = choice("mtp", default="mtp")


@dataclass(frozen=True, kw_only=True)
class FolderDrafterConfig(ModelDrafterConfig):
    """Base class of the options of drafters that have their weights in a folder of their own."""

    model: str = required("name the folder of its weights")
    """The folder with the weights of the drafter."""


@dataclass(frozen=True, kw_only=True)
class Eagle3DrafterConfig(FolderDrafterConfig):
    """`eagle3`: drafts with an EAGLE-3 draft head, which reads the policy's hidden states."""

    type: str = choice("eagle3", default="eagle3")


@dataclass(frozen=True, kw_only=True)
class DraftModelDrafterConfig(FolderDrafterConfig):
    """`draft_model`: drafts with a small language model in the policy's engine. Its tokenizer must be the policy's."""

    type: str = choice("draft_model", default="draft_model")


@dataclass(frozen=True, kw_only=True)
class BlockDrafterConfig(FolderDrafterConfig):
    """Base class of the options of draft heads that draft all tokens of a request for an engine step in one forward pass.

    These tokens are called a block.
    """


@dataclass(frozen=True, kw_only=True)
class DflashDrafterConfig(BlockDrafterConfig):
    """`dflash`: drafts several tokens in one forward pass, each of them independently of the others."""

    type: str = choice("dflash", default="dflash")


@dataclass(frozen=True, kw_only=True)
class DsparkDrafterConfig(BlockDrafterConfig):
    """`dspark`: drafts several tokens in one forward pass. Each token depends on the one before it."""

    type: str = choice("dspark", default="dspark")


@dataclass(frozen=True, kw_only=True)
class RemoteDrafterConfig(DrafterConfig):
    """`remote`: drafts with a small model in an engine of its own, which still drafts while the policy's engine verifies."""

    type: str = choice("remote", default="remote")
    model: str = required("name the folder of its weights")
    """The folder with the weights of the small model."""
    weights_from: str | None = None
    """A folder to which the trainer of the draft model publishes new weights. Drafters load the newest subfolder when they
    start, and each new one while they draft. With `null`, they keep the weights of `model` until `publish-draft` gives them
    others."""
    sampling: str = choice(*DRAFT_SAMPLING, default="shared_noise")
    """How the drafter chooses draft tokens. `shared_noise` samples its distribution with the Gumbel noise that the policy will
    use, so that both often sample the same token. `greedy` takes the most likely tokens."""
    workers: int = bounded(0, low=0, high=64)
    """The number of drafter processes that the run starts and supervises. In NeMo-RL, Ray starts them. Leave it at 0 if you
    set `addresses`."""
    addresses: tuple[str, ...] = ()
    """Addresses of drafters that `serve-drafter` has started, such as `tcp://10.0.0.7:5570`."""
    gpus: float = bounded(0.0, low=0.0, high=1.0)
    """The number of GPUs of each drafter that NeMo-RL starts. They come on top of the GPUs that `cluster` counts. With 0.5 two
    drafters share one GPU, and with 0 they run on a CPU."""
    most_ahead: int = bounded(24, low=1, high=64)
    """The most draft tokens that a drafter may draft beyond the text that the policy has sampled. If this is less than twice
    `num_speculative_tokens`, drafters have to wait for the policy's tokens."""
    max_requests: int = bounded(256, low=1, high=4096)
    """The most requests, of all engines together, that one drafter process serves at the same time."""
    allowed_hosts: tuple[str, ...] = ()
    """IP addresses, networks and names of the hosts that may ask for drafts. A drafter looks up the names when it starts. An
    empty list allows every host that knows the secret."""
    vllm_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the drafter's own vLLM engine, such as `gpu_memory_utilization`."""
    placement: str = choice("as_written", "auto", default="as_written")
    """Where drafts are made. `as_written` means in drafter processes, as the config says. `auto` is for local runs with
    `workers`. It chooses between drafter processes, the policy's engine, and no drafts, whichever is fastest by the times in
    `profile`."""
    profile: str | None = None
    """For `placement: auto`, the file that `specrollout-lab profile` has written on this machine."""
    acceptance: float = bounded(0.8, low=0.0, high=1.0)
    """For `placement: auto`, the expected probability that a draft token is accepted if all draft tokens before it were
    accepted."""

    def check(self, path: str) -> None:
        """Raises ConfigError if options contradict each other, or if an address or the name of a host is not valid."""
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
        """Raises ConfigError if `weights_from` cannot be a folder to which weights are published. It need not exist yet."""
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
"""The class of the options of each `type` of drafter, in the order in which docs/reference/block.md lists them."""


def _types_of(base: type[DrafterConfig]) -> tuple[str, ...]:
    return tuple(name for name, cls in DRAFTERS.items() if issubclass(cls, base))


MODEL_DRAFTERS = _types_of(ModelDrafterConfig)
BLOCK_DRAFTERS = _types_of(BlockDrafterConfig)
REMOTE_DRAFTER = RemoteDrafterConfig.type

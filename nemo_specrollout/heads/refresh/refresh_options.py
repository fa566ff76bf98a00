# SPDX-License-Identifier: Apache-2.0
"""Options of an offline refresh, which are the flags of `nemo-specrollout refresh-draft` with their bounds and help texts."""

import dataclasses
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_specrollout.config.block import MIXED_LOSS
from nemo_specrollout.config.strict import bounded, choice

DEFAULT_MINUTES = 10.0
"""Minutes of training if neither steps nor minutes are given."""
MAY_DIFFER = ("device", "replace")
"""Names of options that may differ between an interrupted command and the command that continues it."""
DTYPES = ("float32", "bfloat16")


def _flag(
    text: str, metavar: str, default: Any = dataclasses.MISSING, options: tuple[str, ...] = (), **bounds: float
) -> Any:
    """Returns the dataclass field of an option. `text` is its help text, and `metavar` stands for its value in the help.

    If `options` are given, the value must be one of them. Otherwise it must lie within `bounds`, which are arguments of
    `bounded`.
    """
    checked = choice(*options) if options else bounded(**bounds)
    return dataclasses.field(default=default, metadata={**checked.metadata, "help": text, "metavar": metavar})


@dataclass(frozen=True)
class RefreshOptions:
    """Values of all flags of `refresh-draft`.

    None means that a flag was not given. Its help text says what happens then.
    """

    policy: str = _flag("the policy, as a Hugging Face folder or a step_N folder of NeMo-RL that has one", "CKPT")
    out: str = _flag("folder of the new head, which vLLM serves without conversion", "DIR")
    draft: str | None = _flag(
        "start from this head, and replace it only if the new one is better (default: start from scratch)", "DIR", None
    )
    rollouts: tuple[str, ...] = _flag("JSONL files, or folders of them, such as NeMo-RL's logs", "PATH", ())
    layer_ids: tuple[int, ...] = _flag(
        "policy layers whose inputs a new head reads, such as 2,18,33 (default: an early, a middle and a late one)",
        "IDS",
        (),
    )
    draft_vocab: int | None = _flag(
        "let a new head draft only the N most frequent tokens (default: all)", "N", None, low=1
    )
    steps: int | None = _flag("optimizer steps, which make the result repeatable", "N", None, low=1)
    minutes: float | None = _flag(
        f"minutes of training (default: {DEFAULT_MINUTES:g} if --steps is not given)", "M", None, above=0.0
    )
    loss: str = _flag(
        "loss of speculators, which is nla, kl_div, tv, lk_hybrid, or JSON of several with weights", "NAME", MIXED_LOSS
    )
    tv_after: float = _flag(
        "share of the training after which the loss is total variation alone, 1 for never", "X", 1.0, low=0.0, high=1.0
    )
    lr: float | None = _flag(
        "learning rate (default: 3e-3 up to a hidden size of 256, falling to 1e-4 at 4096)", "X", None, above=0.0
    )
    batch_tokens: int | None = _flag(
        "tokens of an optimizer step (default: 256 on a CPU, 4096 on a GPU)", "N", None, low=8
    )
    ttt_steps: int = _flag("draft positions that are trained", "N", 5, low=1, high=16)
    temperature: float = _flag("sampling temperature of the rollouts that the head is for", "T", 1.0, low=0.0)
    num_drafts: int = _flag("draft tokens of a request in a step, for which heads are judged", "K", 3, low=1, high=16)
    confidence: float = _flag(
        "how sure the publish gate must be that the new head is not worse", "C", 0.95, low=0.5, below=1.0
    )
    tolerance: float = _flag("by how much the acceptance length may be worse and still pass", "X", 0.0, low=0.0)
    held_out_share: float = _flag(
        "share of prompts that judge heads and are not trained on, which is raised if it is fewer than 8 prompts",
        "X",
        0.1,
        above=0.0,
        below=1.0,
    )
    max_length: int | None = _flag("longest text in tokens (default: the policy's context)", "N", None, low=8)
    store_gb: float = _flag(
        "most disk space, and memory, of features in GB, beyond which the first rollouts are left out",
        "G",
        8.0,
        above=0.0,
    )
    dtype: str = _flag("dtype of the saved head, float32 or bfloat16", "NAME", "float32", DTYPES)
    seed: int = _flag("seed of a new head, and of the order of its data", "N", 0, low=0, high=2**32 - 1)
    policy_version: int = _flag("step of the policy, for the head's card", "N", 0, low=0)
    device: str = _flag("device to train on, which is auto, cpu or cuda", "NAME", "auto", ("auto", "cpu", "cuda"))
    replace: bool = _flag("replace a head that is at --out", "", False)

    @property
    def recorded(self) -> dict[str, Any]:
        """Values of the options, by name, without those of `MAY_DIFFER`.

        A command can continue an interrupted one only if these values are the same.
        """
        return {name: value for name, value in asdict(self).items() if name not in MAY_DIFFER}

    @property
    def draft_folder(self) -> Path | None:
        return None if self.draft is None else Path(self.draft)

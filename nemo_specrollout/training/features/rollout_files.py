# SPDX-License-Identifier: Apache-2.0
"""Rollouts that were stored as text files, read into token ids: what a draft head is trained on offline.

A line of a JSONL file is one of
  {"prompt_token_ids": [...], "response_token_ids": [...]}
  {"prompt": "...", "response": "..."}, tokenized by the policy's tokenizer as they stand
  what NeMo-RL's GRPO logs as train_data_step{N}.jsonl: token_ids, token_loss_mask, input_lengths.
Further keys do no harm. Every error is a ValueError that names file, line and fix.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from nemo_specrollout.training.features.feature_store import is_held_out
from nemo_specrollout.training.features.hf_features import Text

MIN_PROMPTS, MIN_HELD_OUT_PROMPTS = 16, 8
FORMS = "prompt_token_ids and response_token_ids, prompt and response, or token_ids and token_loss_mask as NeMo-RL logs them"
_TOKENIZER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt", "tokenizer_config.json")

Encode = Callable[[str, bool], list[int]]
"""Text to token ids; True: it begins a sequence, so that the tokenizer's special tokens are added."""


@dataclass(frozen=True)
class RolloutText:
    """A response with what came before it: `token_ids`, of which `prompt_length` were given. In a conversation each turn
    is a text of its own; the first `first_prompt_length` tokens are the prompt that all its samples have in common."""

    token_ids: list[int]
    prompt_length: int
    first_prompt_length: int

    @property
    def first_prompt(self) -> list[int]:
        return self.token_ids[: self.first_prompt_length]

    @property
    def is_first_turn(self) -> bool:
        return self.prompt_length == self.first_prompt_length

    @property
    def text(self) -> Text:
        """As `hf_features` takes it."""
        return self.token_ids, self.prompt_length


@dataclass(frozen=True)
class Rollouts:
    """What was read, and what was left out: responses of no token, and prompts that fill the context; `num_cut` texts
    were cut at its end."""

    texts: tuple[RolloutText, ...]
    num_files: int = 0
    num_empty: int = 0
    num_too_long: int = 0
    num_cut: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(text.token_ids) for text in self.texts)


def tokenizer_hash(folder: Path) -> str:
    """Names the tokenizer of a Hugging Face folder: the same for the same vocabulary, merges and special tokens, however
    tokenizer.json was formatted; without one, of the files that are there; `none` without any."""
    file = folder / "tokenizer.json"
    try:
        tree = json.loads(file.read_bytes())
        model = dict(tree["model"])
        model["merges"] = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges") or []]
        added = sorted((token["id"], token["content"]) for token in tree.get("added_tokens") or [])
        content = [json.dumps([model, added], sort_keys=True).encode()]
    except (OSError, ValueError, LookupError, TypeError):
        files = [f for f in (file, *(folder / name for name in _TOKENIZER_FILES)) if f.is_file()]
        content = [f.read_bytes() for f in files]
    return hashlib.sha256(b"\0".join(content)).hexdigest()[:32] if content else "none"


def is_feature_store(path: Path) -> bool:
    """Whether the folder is a feature store, which is used as it is."""
    return (path / "index.json").is_file()


def rollout_files(paths: Sequence[Path]) -> list[Path]:
    """The files that `paths` name: of a folder, NeMo-RL's logs below it by their step, else all *.jsonl. Raises ValueError."""
    found: list[Path] = []
    for path in paths:
        if path.is_file():
            found.append(path)
            continue
        if not path.is_dir():
            raise ValueError(f"--rollouts {path}: no such file or folder; name JSONL files, or folders of them")
        files = list(path.rglob("train_data_step*.jsonl")) or list(path.rglob("*.jsonl"))
        if not files:
            raise ValueError(f"--rollouts {path}: the folder holds no *.jsonl file; name one that does")
        found += sorted(files, key=lambda f: (str(f.parent), len(f.name), f.name))
    return list(dict.fromkeys(found))


def read_rollouts(paths: Sequence[Path], policy_folder: Path, vocab_size: int, max_length: int) -> Rollouts:
    """Reads JSONL files and folders of them, in the order given.

    Args:
        paths: files, or folders.
        policy_folder: whose tokenizer reads lines of text.
        vocab_size: of the policy; ids must be below.
        max_length: tokens of a text; what is longer is cut, or left out where no generated token would remain.

    Raises ValueError, in a sentence, for what is not as this module's docstring says.
    """
    encode, files = _encoder(policy_folder), rollout_files(paths)
    texts: list[RolloutText] = []
    num_empty = num_too_long = num_cut = 0
    for file in files:
        for where, record in _records(file):
            read = list(_texts(record, where, encode))
            num_empty += not read
            for text in read:
                _check_ids(text.token_ids, vocab_size, where)
                if text.prompt_length >= max_length:
                    num_too_long += 1
                    continue
                num_cut += len(text.token_ids) > max_length
                texts.append(RolloutText(text.token_ids[:max_length], text.prompt_length, text.first_prompt_length))
    if not texts:
        why = f"{num_empty} responses are empty and {num_too_long} prompts fill the context of {max_length} tokens"
        raise ValueError(f"--rollouts {', '.join(map(str, paths))}: nothing to learn from ({why}); give other rollouts")
    return Rollouts(tuple(texts), len(files), num_empty, num_too_long, num_cut)


def read_prompts(file: Path, policy_folder: Path, vocab_size: int) -> list[list[int]]:
    """Token ids of different prompts, in order: JSONL lines {"prompt": ...} or {"prompt_token_ids": [...]}, or a text a line.
    Raises ValueError."""
    encode = _encoder(policy_folder)
    prompts = []
    first = next((line for _, line in _lines(file)), "")
    records = _records(file) if first.lstrip().startswith("{") else ((w, {"prompt": line}) for w, line in _lines(file))
    for where, record in records:
        ids: Any
        if isinstance(record.get("prompt"), str):
            ids = encode(record["prompt"], True)
        elif "prompt_token_ids" in record:
            ids = record["prompt_token_ids"]
        else:
            raise ValueError(f"{where}: keys {_keys(record)}; a prompt has prompt (text) or prompt_token_ids")
        _check_ids(ids, vocab_size, where)
        if ids:
            prompts.append(ids)
    if not prompts:
        raise ValueError(f"--prompts {file}: no prompt in it; give one a line")
    return [list(ids) for ids in dict.fromkeys(map(tuple, prompts))]


def held_out_share(prompts: Iterable[Sequence[int]], wanted: float) -> float:
    """The share of prompts to hold out: `wanted`, or as much more as it takes to hold out 8. Raises ValueError for fewer than
    16 different prompts, which cannot be learned from and judged by too."""
    different = {tuple(p) for p in prompts}
    if len(different) < MIN_PROMPTS:
        raise ValueError(
            f"{len(different)} different prompts are too few to train and judge a head; give at least {MIN_PROMPTS}"
        )
    shares = [wanted, *(i / 100 for i in range(1, 101) if i / 100 > wanted)]
    for share in shares:
        num_held_out = sum(is_held_out(p, share) for p in different)
        if MIN_HELD_OUT_PROMPTS <= num_held_out < len(different):
            return share
    raise ValueError(f"a held-out share of {wanted} leaves nothing to train on; lower --held-out-share")


def _encoder(policy_folder: Path) -> Encode:
    """Loads the tokenizer when the first text is read."""
    loaded: list[Any] = []

    def encode(text: str, begins: bool) -> list[int]:
        if not loaded:
            from transformers import AutoTokenizer

            try:
                loaded.append(AutoTokenizer.from_pretrained(policy_folder, local_files_only=True))
            except (OSError, ValueError, LookupError) as error:
                raise ValueError(
                    f"{policy_folder}: its tokenizer cannot be loaded ({' '.join(str(error).split())[:120]}); give token ids"
                ) from error
        return list(loaded[0](text, add_special_tokens=begins)["input_ids"])

    return encode


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """(place, line) of lines that are not blank."""
    try:
        with file.open(encoding="utf-8") as opened:
            for number, line in enumerate(opened, 1):
                if line.strip():
                    yield f"{file}, line {number}", line.strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"{file} cannot be read ({reason}); name a JSONL file") from error


def _records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, line in _lines(file):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON ({error}); write the line again, or remove it") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where}: {type(record).__name__}, not an object; a line has {FORMS}")
        yield where, record


def _texts(record: Mapping[str, Any], where: str, encode: Encode) -> Iterator[RolloutText]:
    """Of one line, whatever its form; none where nothing was generated."""
    if {"token_ids", "token_loss_mask"} <= record.keys():
        yield from _logged(record, where)
        return
    if {"prompt_token_ids", "response_token_ids"} <= record.keys():
        prompt, response = record["prompt_token_ids"], record["response_token_ids"]
    elif isinstance(record.get("prompt"), str) and isinstance(record.get("response"), str):
        prompt, response = encode(record["prompt"], True), encode(record["response"], False)
    else:
        raise ValueError(f"{where}: keys {_keys(record)}; a rollout has {FORMS}")
    if not (isinstance(prompt, list) and isinstance(response, list)):
        raise ValueError(f"{where}: prompt_token_ids and response_token_ids must be lists of numbers")
    if not prompt:
        raise ValueError(f"{where}: the prompt is empty; give at least one token before the response")
    if response:
        yield RolloutText([*prompt, *response], len(prompt), len(prompt))


def _logged(record: Mapping[str, Any], where: str) -> Iterator[RolloutText]:
    """NeMo-RL logs batches of one sample, padded: each value is a list of one. A mask of 1 is a generated token."""
    rows, masks = _rows(record["token_ids"]), _rows(record["token_loss_mask"])
    lengths = record.get("input_lengths") or [len(row) for row in rows]
    lengths = lengths if isinstance(lengths, list) else [lengths]
    if not len(rows) == len(masks) == len(lengths) or any(len(r) != len(m) for r, m in zip(rows, masks, strict=False)):
        raise ValueError(
            f"{where}: token_ids, token_loss_mask and input_lengths differ in length; write the line again"
        )
    for row, mask, length in zip(rows, masks, lengths, strict=True):
        yield from _turns(row[:length], mask[:length])


def _turns(ids: list[int], mask: list[float]) -> Iterator[RolloutText]:
    """A text for each run of generated tokens that something precedes."""
    first = stop = 0
    for is_generated, run in groupby(mask, bool):
        start, stop = stop, stop + sum(1 for _ in run)
        if is_generated and start > 0:
            first = first or start
            yield RolloutText(ids[:stop], start, first)


def _rows(value: Any) -> list[list[Any]]:
    """A batch of lists; a flat list is a batch of one."""
    if not isinstance(value, list):
        return []
    return value if all(isinstance(v, list) for v in value) else [value]


def _check_ids(ids: Any, vocab_size: int, where: str) -> None:
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise ValueError(f"{where}: token ids must be a list of whole numbers")
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = max(ids) if max(ids) >= vocab_size else min(ids)
        raise ValueError(
            f"{where}: token id {wrong} is not of the policy's vocabulary of {vocab_size}; these are of another tokenizer, "
            "give the policy's own rollouts"
        )


def _keys(record: Mapping[str, Any]) -> str:
    return f"{', '.join(sorted(record)[:6])}{' ...' if len(record) > 6 else ''}" if record else "none"

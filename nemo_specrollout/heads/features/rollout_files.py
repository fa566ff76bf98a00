# SPDX-License-Identifier: Apache-2.0
"""Reads rollouts from text files, for the offline training of a draft head.

A line of a JSONL file of rollouts has one of three forms, and may have further keys:
  {"prompt_token_ids": [...], "response_token_ids": [...]}
  {"prompt": "...", "response": "..."}, which the policy's tokenizer encodes unchanged
  token_ids, token_loss_mask and input_lengths, as NeMo-RL's GRPO logs them in train_data_step{N}.jsonl.
Every error is a ValueError that names file, line and fix.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from nemo_specrollout.heads.features.features import Text, is_held_out

MIN_PROMPTS = 16
"""Minimum number of different prompts to train and judge a head."""
MIN_HELD_OUT_PROMPTS = 8
"""Minimum number of different prompts to judge a head."""
FORMS = "prompt_token_ids and response_token_ids, prompt and response, or token_ids and token_loss_mask as NeMo-RL logs them"

Encode = Callable[[str, bool], list[int]]
"""Returns the token ids of a text. If the flag is set, the text begins a sequence and gets the special tokens for that."""


@dataclass(frozen=True)
class RolloutText:
    """Response with all tokens before it. Each turn of a conversation is a text of its own."""

    token_ids: list[int]
    """Tokens of prompt and response."""
    prompt_length: int
    first_prompt_length: int
    """Tokens of the first prompt, which all samples of a conversation share."""

    @property
    def first_prompt(self) -> list[int]:
        return self.token_ids[: self.first_prompt_length]

    @property
    def is_first_turn(self) -> bool:
        """Whether the response answers the first prompt."""
        return self.prompt_length == self.first_prompt_length

    @property
    def text(self) -> Text:
        """The text as `hf_features` expects it."""
        return self.token_ids, self.prompt_length


def rollout_files(paths: Sequence[Path]) -> list[Path]:
    """Returns the files that `paths` name, each once.

    A folder stands for NeMo-RL's logs below it in the order of their steps, or else for all *.jsonl files below it.
    """
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


def read_rollouts(
    paths: Sequence[Path], policy_folder: Path, vocab_size: int, max_length: int
) -> tuple[list[RolloutText], list[str]]:
    """Returns the texts of files and folders, in the order given, and sentences about what was read and left out.

    A text of more than `max_length` tokens is cut, or skipped if its prompt alone fills that length.
    """
    encode = _encoder(policy_folder)
    files = rollout_files(paths)
    texts: list[RolloutText] = []
    num_empty = num_too_long = num_cut = 0
    for where, record in (line for file in files for line in _records(file)):
        found = list(_texts(record, where, encode))
        num_empty += not found
        for text in found:
            _check_ids(text.token_ids, vocab_size, where)
            if text.prompt_length >= max_length:
                num_too_long += 1
                continue
            num_cut += len(text.token_ids) > max_length
            texts.append(replace(text, token_ids=text.token_ids[:max_length]))
    if not texts:
        why = f"{num_empty} responses are empty and {num_too_long} prompts fill the context of {max_length} tokens"
        raise ValueError(f"--rollouts {', '.join(map(str, paths))}: nothing to learn from ({why}); give other rollouts")
    num_tokens = sum(len(text.token_ids) for text in texts)
    left_out = (
        (num_empty, "rollouts without a response were skipped"),
        (num_too_long, f"prompts fill the context of {max_length} tokens and were skipped"),
        (num_cut, f"texts were cut at {max_length} tokens"),
    )
    sentences = [f"rollouts: {len(texts)} texts of {num_tokens} tokens in {len(files)} files"]
    return texts, sentences + [f"{number} {what}" for number, what in left_out if number]


def held_out_share(prompts: Iterable[Sequence[int]], wanted: float) -> float:
    """Returns the share of prompts to hold out: `wanted`, or the next larger percentage that holds out 8 prompts.

    Raises ValueError for fewer than 16 different prompts, and if no share leaves a prompt to train on.
    """
    different = {tuple(p) for p in prompts}
    if len(different) < MIN_PROMPTS:
        raise ValueError(
            f"{len(different)} different prompts are too few to train and judge a head; give at least {MIN_PROMPTS}"
        )
    for share in (wanted, *(i / 100 for i in range(1, 101) if i / 100 > wanted)):
        if MIN_HELD_OUT_PROMPTS <= sum(is_held_out(p, share) for p in different) < len(different):
            return share
    raise ValueError(f"a held-out share of {wanted} leaves nothing to train on; lower --held-out-share")


def _encoder(policy_folder: Path) -> Encode:
    """Returns an encoder that loads the tokenizer when it is first called."""

    @cache
    def tokenizer() -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(policy_folder, local_files_only=True)
        except (OSError, ValueError, LookupError) as error:
            reason = " ".join(str(error).split())[:120]
            raise ValueError(f"{policy_folder}: its tokenizer cannot be loaded ({reason}); give token ids") from error

    return lambda text, begins: token_ids_of(tokenizer(), text, begins)


def token_ids_of(tokenizer: Any, text: str, begins: bool = True) -> list[int]:
    """Returns the ids of a text. If it `begins` a sequence, it gets the special tokens for that, unless it has them."""
    ids = list(tokenizer(text, add_special_tokens=begins)["input_ids"])
    added = len(os.path.commonprefix([ids, tokenizer("")["input_ids"]])) if begins else 0  # noqa: RUF071 (lists)
    return ids[added:] if ids[:added] == ids[added : 2 * added] else ids


def _records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place, JSON object) for each line that is not blank."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"{file} cannot be read ({reason}); name a JSONL file") from error
    for where, line in ((f"{file}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON ({error}); write the line again, or remove it") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where}: {type(record).__name__}, not an object; a line has {FORMS}")
        yield where, record


def _texts(record: dict[str, Any], where: str, encode: Encode) -> Iterator[RolloutText]:
    """Yields the texts of a line in any of the three forms; none if nothing was generated."""
    if {"token_ids", "token_loss_mask"} <= record.keys():
        yield from _logged_texts(record, where)
        return
    if {"prompt_token_ids", "response_token_ids"} <= record.keys():
        prompt = record["prompt_token_ids"]
        response = record["response_token_ids"]
    elif isinstance(record.get("prompt"), str) and isinstance(record.get("response"), str):
        prompt = encode(record["prompt"], True)
        response = encode(record["response"], False)
    else:
        raise ValueError(f"{where}: keys {', '.join(sorted(record)[:6]) or 'none'}; a rollout has {FORMS}")
    if not (isinstance(prompt, list) and isinstance(response, list)):
        raise ValueError(f"{where}: prompt_token_ids and response_token_ids must be lists of numbers")
    if not prompt:
        raise ValueError(f"{where}: the prompt is empty; give at least one token before the response")
    if response:
        yield RolloutText([*prompt, *response], len(prompt), len(prompt))


def _logged_texts(record: dict[str, Any], where: str) -> Iterator[RolloutText]:
    """Yields a text for each generated span, where the mask is 1, that follows other tokens in a line of NeMo-RL."""
    rows = _as_batch(record["token_ids"])
    masks = _as_batch(record["token_loss_mask"])
    lengths = record.get("input_lengths") or [len(row) for row in rows]
    lengths = lengths if isinstance(lengths, list) else [lengths]
    has_equal_rows = [len(row) for row in rows] == [len(mask) for mask in masks]
    if not has_equal_rows or len(rows) != len(lengths):
        raise ValueError(
            f"{where}: token_ids, token_loss_mask and input_lengths differ in length; write the line again"
        )
    for row, mask, length in zip(rows, masks, lengths, strict=True):
        first_prompt = stop = 0
        for is_generated, span in groupby(mask[:length], bool):
            start = stop
            stop = stop + len(list(span))
            if is_generated and start > 0:
                first_prompt = first_prompt or start
                yield RolloutText(row[:stop], start, first_prompt)


def _as_batch(value: Any) -> list[list[Any]]:
    """Returns a list of lists: the value, or the value as the only row."""
    if not isinstance(value, list):
        return []
    return value if all(isinstance(v, list) for v in value) else [value]


def _check_ids(ids: Any, vocab_size: int, where: str) -> None:
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise ValueError(f"{where}: token ids must be a list of whole numbers")
    if wrong := next((i for i in ids if not 0 <= i < vocab_size), None):
        raise ValueError(
            f"{where}: token id {wrong} is not of the policy's vocabulary of {vocab_size}; these are of another tokenizer, "
            "give the policy's own rollouts"
        )

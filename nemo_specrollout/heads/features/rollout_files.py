# SPDX-License-Identifier: Apache-2.0
"""Reads rollouts from text files, for the offline training of a draft head.

A line of a JSONL file of rollouts has one of three forms, and may have further keys:
  {"prompt_token_ids": [...], "response_token_ids": [...]}
  {"prompt": "...", "response": "..."}, which the policy's tokenizer encodes unchanged
  token_ids, token_loss_mask and input_lengths, as NeMo-RL's GRPO logs them in train_data_step{N}.jsonl.
A key whose value is null or NaN counts as absent. Such values appear when lines of different forms come from one table, which
has the columns of all forms in every row. A line that has a prompt, but a response that is null or empty, is left out. It is a
turn without text, for example one that only calls tools. Every error is a ValueError that names file, line, field and fix.
"""

import math
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from nemo_specrollout.heads.features.features import Text, is_held_out, loading_faults
from nemo_specrollout.storage.text_files import json_lines, whole_number

MIN_PROMPTS = 16
"""Minimum number of different prompts that are needed to train and judge a head."""
MIN_HELD_OUT_PROMPTS = 8
"""Minimum number of different held-out prompts that are needed to judge a head."""
FORMS = "prompt_token_ids and response_token_ids, prompt and response, or token_ids and token_loss_mask as NeMo-RL logs them"
_AS_LOGGED = ("token_ids", "token_loss_mask")
_AS_IDS = ("prompt_token_ids", "response_token_ids")
_AS_TEXT = ("prompt", "response")

Encode = Callable[[str, bool], list[int]]
"""Function that returns the token ids of a text. Its second argument is true for a text at the beginning of a sequence, which
gets the tokenizer's special tokens for the beginning."""


@dataclass(frozen=True)
class RolloutText:
    """A response of the policy with all tokens before it. Each response of a conversation is a text of its own."""

    token_ids: list[int]
    """Tokens of prompt and response."""
    prompt_length: int
    first_prompt_length: int
    """Number of tokens of the first prompt, which all samples of a conversation share."""

    @property
    def first_prompt(self) -> list[int]:
        return self.token_ids[: self.first_prompt_length]

    @property
    def is_first_turn(self) -> bool:
        """Whether the response answers the first prompt."""
        return self.prompt_length == self.first_prompt_length

    @property
    def text(self) -> Text:
        """Token ids and prompt length, in the form in which `hf_features` takes them."""
        return self.token_ids, self.prompt_length


def rollout_files(paths: Sequence[Path]) -> list[Path]:
    """Returns the files that `paths` stand for, without duplicates. Raises ValueError for a path without files.

    A folder stands for NeMo-RL's files train_data_step*.jsonl below it, in the order of their steps. If it has none, it stands
    for all *.jsonl files below it.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_file():
            found.append(path)
            continue
        if not path.is_dir():
            fault = "neither a regular file nor a folder" if path.exists() else "no such file or folder"
            raise ValueError(f"--rollouts {path}: {fault}; name JSONL files, or folders of them")
        files = list(path.rglob("train_data_step*.jsonl")) or list(path.rglob("*.jsonl"))
        if not files:
            raise ValueError(f"--rollouts {path}: the folder holds no *.jsonl file; name one that does")
        found += sorted(files, key=lambda f: (str(f.parent), len(f.name), f.name))
    return list(dict.fromkeys(found))


def read_rollouts(
    paths: Sequence[Path], policy_folder: Path, vocab_size: int, max_length: int
) -> tuple[list[RolloutText], list[str]]:
    """Returns the rollouts in files and folders, in the order given, and sentences for the user about what was read.

    A text of more than `max_length` tokens is cut, or skipped if its prompt alone has that length. The sentences also say what
    was cut or skipped. Raises ValueError for a line that is no rollout, for tokens that are not in the vocabulary, and if no
    rollout is left.
    """
    encode = _encoder(policy_folder)
    files = rollout_files(paths)
    texts: list[RolloutText] = []
    num_empty = num_too_long = num_cut = 0
    for where, record in (line for file in files for line in _records(file)):
        found = list(_texts(record, where, encode))
        num_empty += not found
        for text in found:
            _check_vocabulary(text.token_ids, vocab_size, where)
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
    """Returns the share of prompts to hold out from training, so that at least 8 of `prompts` are held out.

    It is `wanted` if that is enough, and otherwise the next larger whole percentage that is enough. Raises ValueError for
    fewer than 16 different prompts, and if no share leaves a prompt to train on.
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
    """Returns a function that encodes texts with the policy's tokenizer, which it loads at its first call."""

    @cache
    def tokenizer() -> Any:
        from transformers import AutoTokenizer

        with loading_faults(policy_folder, "its tokenizer cannot be loaded", "give token ids"):
            return AutoTokenizer.from_pretrained(policy_folder, local_files_only=True)

    def encode(text: str, begins: bool) -> list[int]:
        loaded = tokenizer()
        with loading_faults(policy_folder, "its tokenizer cannot encode a text", "give token ids"):
            return token_ids_of(loaded, text, begins)

    return encode


def token_ids_of(tokenizer: Any, text: str, begins: bool = True) -> list[int]:
    """Returns the token ids of a text. If `begins` is true, the text is the beginning of a sequence.

    Then the tokenizer's special tokens for the beginning are added, unless the text already has them.
    """
    ids = list(tokenizer(text, add_special_tokens=begins)["input_ids"])
    added = len(os.path.commonprefix([ids, tokenizer("")["input_ids"]])) if begins else 0  # noqa: RUF071 (lists)
    return ids[added:] if ids[:added] == ids[added : 2 * added] else ids


def _records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the place (file and line) and the JSON object of each line that is not blank.

    Raises ValueError if a line is not a JSON object.
    """
    for where, record in json_lines(file):
        if not isinstance(record, dict):
            raise ValueError(f"{where}: {type(record).__name__}, not an object; a line has {FORMS}")
        yield where, record


def _texts(record: dict[str, Any], where: str, encode: Encode) -> Iterator[RolloutText]:
    """Yields the rollouts in one line of a file. The line may have any of the forms in `FORMS`.

    Yields nothing if the line has no generated tokens. Raises ValueError if it has none of these forms.
    """
    present = {key for key, value in record.items() if not _is_absent(value)}
    if present.issuperset(_AS_LOGGED):
        yield from _logged_texts(record, where)
    elif present.issuperset(_AS_IDS):
        prompt, response = (whole_token_ids(record[key], f"{where}: {key}") for key in _AS_IDS)
        yield from _answer(prompt, response, where)
    elif present.issuperset(_AS_TEXT):
        question, answer = (_text(record[key], f"{where}: {key}") for key in _AS_TEXT)
        yield from _answer(encode(question, True), encode(answer, False), where)
    elif not any(prompt in present and response in record for prompt, response in (_AS_IDS, _AS_TEXT)):
        keys = _listed(present) or "none"
        null = _listed(record.keys() - present)
        raise ValueError(f"{where}: keys {keys}{f' (null: {null})' if null else ''}; a rollout has {FORMS}")


def _listed(keys: Iterable[str]) -> str:
    """Returns up to six keys as a text for an error, in alphabetical order and each cut to 40 characters."""
    return ", ".join(key[:40] for key in sorted(keys)[:6])


def _is_absent(value: Any) -> bool:
    """Returns whether a value is null, or the NaN that pandas writes for it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _answer(prompt: list[int], response: list[int], where: str) -> Iterator[RolloutText]:
    if not prompt:
        raise ValueError(f"{where}: the prompt is empty; give at least one token before the response")
    if response:
        yield RolloutText([*prompt, *response], len(prompt), len(prompt))


def _logged_texts(record: dict[str, Any], where: str) -> Iterator[RolloutText]:
    """Yields a rollout for each response in a line of NeMo-RL's log.

    A line may have several samples, and a sample several responses. A response is a span of tokens whose mask is 1. A span at
    the beginning of a sample is skipped, because it has no prompt.
    """
    rows, masks = (_as_batch(record[key], f"{where}: {key}") for key in _AS_LOGGED)
    given = record.get("input_lengths")
    lengths = [len(row) for row in rows] if _is_absent(given) else given if isinstance(given, list) else [given]
    has_equal_rows = [len(row) for row in rows] == [len(mask) for mask in masks]
    if not has_equal_rows or len(rows) != len(lengths):
        raise ValueError(
            f"{where}: token_ids, token_loss_mask and input_lengths differ in length; write the line again"
        )
    for row, mask, length in zip(rows, masks, lengths, strict=True):
        ids = whole_token_ids(row, f"{where}: token_ids")
        num_tokens = whole_number(length)
        if num_tokens is None or not 0 <= num_tokens <= len(ids):
            what = f"{where}: input_lengths has {reprlib.repr(length)}, where token_ids has {len(ids)} numbers"
            raise ValueError(f"{what}; write the line again")
        if not all(isinstance(entry, int | float) and not _is_absent(entry) for entry in mask):
            raise ValueError(f"{where}: token_loss_mask must be a list of 0 and 1; write the line again")
        first_prompt = stop = 0
        for is_generated, span in groupby(mask[:num_tokens], bool):
            start = stop
            stop = stop + len(list(span))
            if is_generated and start > 0:
                first_prompt = first_prompt or start
                yield RolloutText(ids[:stop], start, first_prompt)


def _as_batch(value: Any, field: str) -> list[list[Any]]:
    """Returns `value` as a list of rows, where a list that is not nested is the only row.

    Raises ValueError that names `field` if it is not a list.
    """
    if not isinstance(value, list):
        raise ValueError(f"{field} must be a list, and is {reprlib.repr(value)}; write the line again")
    return value if all(isinstance(v, list) for v in value) else [value]


def _text(value: Any, field: str) -> str:
    """Returns a prompt or a response unchanged. Raises ValueError that names `field` if it is not a valid text."""
    if not isinstance(value, str):
        fix = "messages and their parts need the policy's chat template first, or give token ids"
        raise ValueError(f"{field} must be a text, and is {reprlib.repr(value)}; {fix}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        what = f"{field} has half of a surrogate pair at character {error.start + 1}, which is no Unicode text"
        raise ValueError(f"{what}; write the line again, or remove it") from error
    return value


def whole_token_ids(value: Any, field: str) -> list[int]:
    """Returns a list of token ids as ints. Floats such as 4.0, as pandas writes them, are converted.

    Raises ValueError that names `field` for anything that is not a list of whole numbers.
    """
    if not isinstance(value, list):
        raise ValueError(f"{field} must be a list of whole numbers, and is {reprlib.repr(value)}; write the line again")
    if all(type(i) is int for i in value):
        return value
    ids = [whole_number(i) for i in value]
    if None in ids:
        wrong = reprlib.repr(value[ids.index(None)])
        raise ValueError(f"{field} must be a list of whole numbers, and has {wrong}; write the line again")
    return [i for i in ids if i is not None]


def _check_vocabulary(ids: Sequence[int], vocab_size: int, where: str) -> None:
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise ValueError(
            f"{where}: token id {reprlib.repr(wrong)} is not of the policy's vocabulary of {vocab_size}; these are of "
            "another tokenizer, give the policy's own rollouts"
        )

# SPDX-License-Identifier: Apache-2.0
"""Checks the files, tokenizer, chat template and tensor headers of a Hugging Face folder before an engine starts.

The module does not import torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.local.policy_shape import PolicyShape
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.storage.files import read_regular
from nemo_specrollout.storage.model_folder import (
    read_object,
    size_in,
    stop_token_ids,
    tensor_files,
    tensor_shapes,
    text_config,
)

if TYPE_CHECKING:
    from lab.local.run_sections import DataConfig

_LONGEST_REASON = 120
"""Most characters of a chat template's error that are shown."""
_FIXES = {
    "config.json": "copy the whole folder",
    "tokenizer.json": "copy it too, or let transformers save the tokenizer again",
    "model.safetensors": "copy it too, or save the model again as safetensors",
}
"""Files without which a folder cannot be used, each with the words that tell the user what to do. Large models have several
safetensors files with an index instead of one."""
_TYPES: tuple[tuple[tuple[type, ...], tuple[str, ...]], ...] = (
    ((int,), ("bos_token_id", "pad_token_id", "max_window_layers", "sliding_window")),
    ((bool,), ("tie_word_embeddings", "use_cache", "attention_bias", "mlp_bias", "use_sliding_window")),
    ((int, float), ("attention_dropout", "initializer_range")),
    ((list,), ("layer_types", "architectures")),
    ((str,), ("dtype", "torch_dtype", "hidden_act", "model_type")),
)
"""Types that transformers requires for keys of a config.json. Without this check, an engine's start would end with a traceback
from transformers."""


def check_model_folder(folder: Path) -> dict[str, Any]:
    """Checks that the files of a folder are complete and belong together, and returns its config.json.

    Keys of its `text_config` are moved to the top. Raises ValueError with the file, its fault and the fix.
    """
    has_tensors = bool(tensor_files(folder))
    for name, fix in _FIXES.items():
        if not (has_tensors if name == "model.safetensors" else (folder / name).is_file()):
            raise ValueError(f"{folder} has no {name}; {fix}")
    config = read_object(folder / "config.json")
    _check_types(config, folder / "config.json")
    text = {**config, **text_config(config)}
    for name in ("vocab_size", "num_hidden_layers", "hidden_size", "max_position_embeddings"):
        size_in(text, name, folder / "config.json")
    _check_tokenizer(folder, text["vocab_size"])
    _check_stop_tokens(folder, text["vocab_size"])
    tensor_shapes(tensor_files(folder))
    return text


def check_trainable(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises ValueError unless the local trainer supports the model and the folder has the tensors that its config implies."""
    try:
        shape = PolicyShape.from_hf(config)
    except ValueError as error:
        raise ValueError(f"{folder}/{error}") from error
    found = tensor_shapes(tensor_files(folder))
    if shape.num_layers > len(found):  # a huge number would take long to expand into names
        raise ValueError(
            f"{folder}: config.json has {shape.num_layers} layers, but there are {len(found)} tensors in all"
        )
    expected = shape.hf_shapes()
    missing = sorted(expected.keys() - found.keys())
    surplus = sorted(found.keys() - expected.keys() - {"lm_head.weight"})
    if missing or surplus:
        fault = f"no tensor {missing[0]}" if missing else f"a tensor too many, {surplus[0]}"
        raise ValueError(f"{folder}: there is {fault}; config.json and model.safetensors do not belong together")
    for name, size in expected.items():
        if found[name] != size:
            raise ValueError(f"{folder}: {name} is {list(found[name])}, but config.json makes it {list(size)}")


def _chat_template(folder: Path) -> str | None:
    """Returns the template that transformers uses for a chat without tools, or None without one.

    Raises ValueError if the template is no text.
    """
    if (file := folder / "chat_template.jinja").is_file():
        return read_regular(file).decode("utf-8")
    settings = folder / "tokenizer_config.json"
    found = read_object(settings).get("chat_template") if settings.is_file() else None
    if isinstance(found, list):
        found = {t.get("name"): t.get("template") for t in found if isinstance(t, Mapping)}
    found = found.get("default") if isinstance(found, Mapping) else found
    if found is not None and not isinstance(found, str):
        raise ValueError(f"{settings}: chat_template is {str(found)[:40]!r}; it must be a text: copy the file again")
    return found


def check_chat_template(folder: Path, data: "DataConfig", path: str) -> None:
    """Raises ConfigError if the prompts of `data` need a chat template and the folder has no template that accepts them.

    The error begins with `path`, which is the key under which the config has `data`.
    """
    if data.dataset_name == "step_addition":
        return
    try:
        template = _chat_template(folder)
    except ValueError as error:
        raise ConfigError(f"policy.model_name: {error}") from error
    if template is None:
        raise ConfigError(
            f"{path}.dataset_name: {data.dataset_name} has prompts for a chat, and the tokenizer of {folder} has no chat "
            "template; name a model with one, or step_addition"
        )
    user = [{"role": "user", "content": "1 + 2"}]
    if (reason := _refusal(template, user, folder)) is not None:
        raise ConfigError(
            f"policy.model_name: the chat template of {folder} refuses a user's message ({reason}); mend it"
        )
    if data.dataset_name == "reasoning_gym" and data.system_prompt is not None:
        reason = _refusal(template, [{"role": "system", "content": "Think."}, *user], folder)
        if reason is not None:
            text = f"{data.system_prompt[:40]!r}; the chat template of {folder} refuses a system prompt ({reason})"
            raise ConfigError(f"{path}.system_prompt: {text}: set it to null")


def _check_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.encode("1 + 2 = \N{GREEK SMALL LETTER PI}")  # some fail on characters that they do not know
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # panics of the library are no subclass of Exception
        raise ValueError(f"{file}: no tokenizer ({str(error)[:100]}); copy it again") from error
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    largest = max(vocabulary.values(), default=0)
    if largest >= vocab_size:  # fewer ids than the model has are fine, because the rest is padding
        raise ValueError(
            f"the tokenizer of {folder} has token id {largest}, but the model's vocabulary ends at {vocab_size - 1}; the two "
            "do not belong together"
        )
    settings = folder / "tokenizer_config.json"
    named = read_object(settings) if settings.is_file() else {}
    tokens = _special_tokens(folder)
    for name in ("pad_token", "eos_token", "bos_token"):
        token = tokens.get(name, named.get(name))
        if token is not None and (not isinstance(token, str) or token not in vocabulary):
            raise ValueError(
                f"{settings}: {name} is {token!r}, which is no token; name one, e.g. the one that ends a text"
            )


def _check_stop_tokens(folder: Path, vocab_size: int) -> None:
    """Raises ValueError unless the folder names tokens that end a text, and all of them are in the vocabulary."""
    ids = stop_token_ids(folder)
    if not ids:
        raise ValueError(
            f"{folder} names no token that ends a text, so that every response would run to its limit; write its id as "
            "eos_token_id into generation_config.json"
        )
    for token in ids:
        if token >= vocab_size:
            raise ValueError(f"{folder}: eos_token_id {token} is beyond the vocabulary of {vocab_size}; name another")


def _check_types(config: Mapping[str, Any], file: Path) -> None:
    """Raises ValueError for a value whose type transformers would refuse."""
    inner = config.get("text_config", {})
    if not isinstance(inner, Mapping):
        raise ValueError(f"{file}: text_config is {inner!r}; it must be a block of keys")
    for types, names in _TYPES:
        for name, value in ((n, block.get(n)) for block in (config, inner) for n in names):
            # For Python, a bool is an int.
            if value is not None and (not isinstance(value, types) or (bool not in types and isinstance(value, bool))):
                wanted = " or ".join(t.__name__ for t in types)
                raise ValueError(
                    f"{file}: {name} is {value!r}, which transformers refuses; it must be of type {wanted}"
                )


def _special_tokens(folder: Path) -> dict[str, str]:
    """Returns the special tokens that a tokenizer's files name, by keys such as `eos_token`, as transformers reads them."""
    files = [folder / "tokenizer_config.json", folder / "special_tokens_map.json"]
    settings, older = (read_object(file) if file.is_file() else {} for file in files)
    named = settings if "added_tokens_decoder" in settings else settings | older
    tokens = {n: t.get("content") if isinstance(t, Mapping) else t for n, t in named.items() if n.endswith("_token")}
    return {name: token for name, token in tokens.items() if isinstance(token, str)}


def _refusal(template: str, messages: list[dict[str, str]], folder: Path) -> str | None:
    """Returns why a chat template refuses the messages or turns them into an empty text, or None if it accepts them."""
    from transformers.utils.chat_template_utils import render_jinja_template

    render: Any = render_jinja_template
    try:
        rendered, _ = render([messages], chat_template=template, add_generation_prompt=True, **_special_tokens(folder))
    except Exception as error:  # jinja2's errors, and Python's own from inside a template
        return " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
    return None if rendered[0] else "it makes no text of it"

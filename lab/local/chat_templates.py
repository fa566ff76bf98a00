# SPDX-License-Identifier: Apache-2.0
"""Reads chat templates and special tokens of tokenizers, and tells before an engine starts whether prompts fit. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.storage.files import read_regular
from nemo_specrollout.storage.model_folder import read_object

if TYPE_CHECKING:
    from lab.local.run_sections import DataConfig

_LONGEST_REASON = 120


def special_tokens(folder: Path) -> dict[str, str]:
    """Returns the tokens that a tokenizer's settings name, such as `eos_token`, as transformers reads them."""
    files = [folder / "tokenizer_config.json", folder / "special_tokens_map.json"]
    settings, older = (read_object(file) if file.is_file() else {} for file in files)
    named = settings if "added_tokens_decoder" in settings else settings | older
    tokens = {n: t.get("content") if isinstance(t, Mapping) else t for n, t in named.items() if n.endswith("_token")}
    return {name: token for name, token in tokens.items() if isinstance(token, str)}


def chat_template(folder: Path) -> str | None:
    """Returns the template that transformers uses for a chat without tools; None without one. Raises ValueError."""
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
    """Raises ConfigError, which begins with `path`, if the tokenizer has no chat template for the prompts of `data`."""
    if data.dataset_name == "step_addition":
        return
    try:
        template = chat_template(folder)
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


def _refusal(template: str, messages: list[dict[str, str]], folder: Path) -> str | None:
    """Returns why a template refuses messages, or makes no text of them; None if it takes them."""
    from transformers.utils.chat_template_utils import render_jinja_template

    render: Any = render_jinja_template
    try:
        rendered, _ = render([messages], chat_template=template, add_generation_prompt=True, **special_tokens(folder))
    except Exception as error:  # jinja2's errors, and Python's own from inside a template
        return " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
    return None if rendered[0] else "it makes no text of it"

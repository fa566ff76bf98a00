# SPDX-License-Identifier: Apache-2.0
"""A user's words as the token ids of a prompt, by the model's chat template."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def encode_chat(tokenizer: "PreTrainedTokenizerFast", user: str, system: str | None = None) -> list[int]:
    """Returns the token ids of one user message, ready for a response.

    `system` is the system prompt; with None the template uses its own, if it has one.
    """
    messages = [{"role": "user", "content": user}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])

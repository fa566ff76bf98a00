# SPDX-License-Identifier: Apache-2.0
"""Features of texts by a forward pass of a Hugging Face policy.

Shapes: B texts of a micro-batch, T positions, H hidden size.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoModel, PreTrainedModel

from nemo_specrollout.training.features.features import SequenceFeatures

Text = tuple[Sequence[int], int]
"""Token ids of prompt and response, and the length of the prompt."""


def load_policy(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The decoder of a Hugging Face folder, without its LM head, for inference only."""
    model = AutoModel.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.to(device).eval().requires_grad_(False)


@torch.no_grad()
def hf_features(
    policy: PreTrainedModel,
    texts: Sequence[Text],
    layer_ids: Sequence[int],
    max_tokens: int = 8192,
    policy_version: int = 0,
    dtype: torch.dtype | None = None,
) -> list[SequenceFeatures]:
    """Features of `texts`, in their order.

    Args:
        policy: the decoder (`load_policy`); layer id i is the residual stream before its layer i.
        texts: token ids and length of the prompt, each.
        layer_ids: auxiliary layers, in the order of the features.
        max_tokens: positions of a micro-batch, padding included; a longer text is a micro-batch of its own.
        policy_version: of the policy's weights.
        dtype: of the features; the policy's if None.

    Raises ValueError for a layer that the policy has not, or a text without a generated token.
    """
    num_layers = policy.config.get_text_config().num_hidden_layers
    if min(layer_ids) < 0 or max(layer_ids) >= num_layers:
        raise ValueError(f"layer_ids {list(layer_ids)}: the policy has layers 0 to {num_layers - 1}")
    for ids, prompt_length in texts:
        if not 0 < prompt_length < len(ids):
            raise ValueError(f"prompt_length {prompt_length} of a text of {len(ids)} tokens; nothing was generated")
    found: dict[int, SequenceFeatures] = {}
    for batch in _micro_batches([len(ids) for ids, _ in texts], max_tokens):
        ids_BT = torch.nn.utils.rnn.pad_sequence([torch.tensor(texts[i][0]) for i in batch], batch_first=True)
        # Padding is on the right, where causal attention never looks: no mask, so the fastest kernels.
        output = policy(input_ids=ids_BT.to(policy.device), output_hidden_states=True, use_cache=False)
        aux_BTF = torch.cat([output.hidden_states[i] for i in layer_ids], dim=-1).to("cpu", dtype)
        final_BTH = output.last_hidden_state.to("cpu", dtype)
        for row, i in enumerate(batch):
            ids, prompt_length = texts[i]
            n = len(ids)
            found[i] = SequenceFeatures(
                ids_BT[row, :n].int(),
                aux_BTF[row, :n].clone(),
                final_BTH[row, :n].clone(),
                prompt_length,
                policy_version,
            )
    return [found[i] for i in range(len(texts))]


def _micro_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices of texts of similar length, whose padded size is within `max_tokens` (one text at least)."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and (len(batch) + 1) * lengths[i] > max_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch

# SPDX-License-Identifier: Apache-2.0
"""Features of texts by a forward pass of a Hugging Face policy.

Shapes: B texts of a micro-batch, T positions, F auxiliary layers * hidden size, H hidden size.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoModel, PreTrainedModel

from nemo_specrollout.training.features.features import SequenceFeatures

Text = tuple[Sequence[int], int]
"""Token ids of a prompt with its response, and the length of the prompt."""


def load_policy(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Returns the decoder of a Hugging Face folder without its LM head, for inference."""
    model = AutoModel.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.to(device).eval().requires_grad_(False)


@torch.no_grad()
def hf_features(
    policy: PreTrainedModel, texts: Sequence[Text], layer_ids: Sequence[int], max_tokens: int = 8192
) -> list[SequenceFeatures]:
    """Returns the features of `texts` in their order, in the policy's dtype.

    Args:
        policy: The decoder (`load_policy`).
        texts: Texts with at least one generated token each.
        layer_ids: Auxiliary layers. The feature of layer i is the residual stream before the policy's layer i.
        max_tokens: Most positions of a micro-batch, padding included. A longer text is a micro-batch of its own.

    Raises ValueError for a layer that the policy does not have, and for a text without a generated token.
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
        # Causal attention never sees padding on the right. Without a mask, the fastest kernels are used.
        output = policy(input_ids=ids_BT.to(policy.device), output_hidden_states=True, use_cache=False)
        aux_BTF = torch.cat([output.hidden_states[i] for i in layer_ids], dim=-1).cpu()
        final_BTH = output.last_hidden_state.cpu()
        for row, i in enumerate(batch):
            n = len(texts[i][0])
            found[i] = SequenceFeatures(
                token_ids_T=ids_BT[row, :n].int(),
                aux_TF=aux_BTF[row, :n].clone(),
                final_TH=final_BTH[row, :n].clone(),
                prompt_length=texts[i][1],
                policy_version=0,
            )
    return [found[i] for i in range(len(texts))]


def _micro_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yields indices of texts of similar length: one text, or as many as take `max_tokens` positions when padded."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and (len(batch) + 1) * lengths[i] > max_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch

# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 head of a policy, by `speculators`: made, loaded, saved, and brought up to date with the policy.

A saved folder is loaded as it is by vLLM's `eagle3` method.

Shapes: H hidden size, V the policy's vocabulary, D the head's, S rows of a packed batch, F = auxiliary layers * H.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig, LlamaConfig, PretrainedConfig, Qwen3Config

from nemo_specrollout.config.model_folder import EMBEDDING, LM_HEAD
from nemo_specrollout.training.features.features import default_layer_ids
from nemo_specrollout.training.head.head_facts import (
    FLAT,
    HeadFacts,
    check_head,
    check_layer_ids,
    check_values,
    read_head_tensors,
    read_policy_facts,
)

_COPIED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "rope_parameters",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
_CONFIG_CLASSES: dict[str, Any] = {"qwen3": Qwen3Config, "llama": LlamaConfig}
_DEFAULT_DRAFTS = 3
"""`speculative_tokens` of the saved config; vLLM uses it only where the user gives no number."""


class DraftHead:
    """Owns the network that learns, and copies of the policy's LM head and embedding, which never do.

    `model.verifier_lm_head` is the teacher: it makes the policy's logits (of the draft vocabulary) of the policy's
    final, *normed* hidden states. `teacher_VH` is the same for the whole vocabulary. Example:

        head = create_head(Path("policy"), layer_ids=(1, 2, 3))
        head.set_policy_weights({"lm_head.weight": new_VH, "model.embed_tokens.weight": new_VH})
        save_head(head, Path("head"))
    """

    def __init__(self, model: Eagle3DraftModel, draft_token_ids: torch.Tensor | None, is_tied: bool) -> None:
        """`draft_token_ids` int64 [D] are the policy's ids of the draft vocabulary, None if it is the whole."""
        self.model = model
        self.draft_token_ids = draft_token_ids
        self.has_own_embedding = False
        self.teacher_VH: torch.Tensor = torch.full_like(model.embed_tokens.weight, torch.nan)
        self._is_tied = is_tied
        model.verifier_norm = torch.nn.Identity()
        model.requires_grad_(True)
        model.embed_tokens.requires_grad_(False)
        model.verifier_lm_head.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        return self.model.fc.weight.device

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The policy's layers whose inputs the head reads."""
        return tuple(self.model.target_layer_ids)

    def to(self, device: torch.device | str) -> "DraftHead":
        torch.nn.Module.to(self.model, device)
        self.teacher_VH = self.teacher_VH.to(device)
        if self.draft_token_ids is None:
            self.model.verifier_lm_head.weight.data = self.teacher_VH
        else:
            self.draft_token_ids = self.draft_token_ids.to(device)
        return self

    def learned(self) -> dict[str, torch.nn.Parameter]:
        """What training may change, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def set_policy_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Follows the policy: takes its LM head and embedding, by Hugging Face names; other tensors are ignored.

        Where the two are tied the embedding alone will do. What the head learned stays. Raises ValueError for a shape
        other than the policy's.
        """
        embedding = tensors.get(EMBEDDING)
        lm_head = tensors.get(LM_HEAD, embedding if self._is_tied else None)
        for name, tensor in ((EMBEDDING, embedding), (LM_HEAD, lm_head)):
            if tensor is not None and tensor.shape != self.teacher_VH.shape:
                raise ValueError(f"{name} is {list(tensor.shape)}, the head's policy has {list(self.teacher_VH.shape)}")
        model = self.model
        if embedding is not None and not self.has_own_embedding:
            model.embed_tokens.weight.data.copy_(embedding)
        if lm_head is not None:
            self.teacher_VH = lm_head.detach().to(model.lm_head.weight, copy=True)
            rows = self.teacher_VH if self.draft_token_ids is None else self.teacher_VH[self.draft_token_ids]
            model.verifier_lm_head.weight.data = rows


def create_head(
    policy_folder: Path,
    layer_ids: Sequence[int] | None = None,
    draft_token_ids: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> DraftHead:
    """An untrained head of one layer, float32, that begins as near to the policy as it can: with the policy's LM head and
    last norm, its last layer, and the last auxiliary states as they are. A useful head takes fewer steps so.

    Args:
        policy_folder: Hugging Face folder of the policy: config.json and safetensors.
        layer_ids: auxiliary layers; `default_layer_ids` if None.
        draft_token_ids: the only tokens that the head can draft; all if None.

    Raises ValueError for layer ids or token ids that the policy has not.
    """
    policy = read_policy_facts(policy_folder)
    ids = tuple(layer_ids) if layer_ids is not None else default_layer_ids(policy.num_layers)
    check_layer_ids(ids, policy.num_layers, "new head")
    draft_ids = _check_draft_ids(draft_token_ids, policy.vocab_size)
    num_drafts = policy.vocab_size if draft_ids is None else len(draft_ids)
    config = _make_config(_layer_config(policy_folder), ids, num_drafts, policy_folder, device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Eagle3DraftModel(config)
    if draft_ids is not None:
        _set_vocab(model, draft_ids)
    head = DraftHead(model.float(), draft_ids, policy.is_tied)
    head.set_policy_weights(read_policy_tensors(policy_folder, (LM_HEAD, EMBEDDING)))
    _begin_as_policy(head, policy_folder, policy.num_layers)
    return head.to(device)


def load_head(folder: Path, policy_folder: Path, device: torch.device | str = "cpu") -> DraftHead:
    """A head as `save_head`, `speculators`, or NeMo-RL and others in vLLM's flat layout left it; float32.

    Raises ValueError for what `check_head` finds.
    """
    facts = check_head(folder, policy_folder, read_tensors=False)
    tensors = read_head_tensors(facts)
    check_values(facts, tensors)
    draft_ids = None
    if facts.has_reduced_vocab:
        draft_ids = tensors.pop("d2t") + torch.arange(facts.draft_vocab_size)
        tensors.pop("t2d", None)
    model = Eagle3DraftModel(_config_of(facts, policy_folder, device))
    if draft_ids is not None:
        _set_vocab(model, draft_ids)
    head = DraftHead(model.float(), draft_ids, read_policy_facts(policy_folder).is_tied)
    head.set_policy_weights(read_policy_tensors(policy_folder, (LM_HEAD, EMBEDDING)))
    embedding = tensors.pop("embed_tokens.weight", None)
    if embedding is not None and not torch.equal(embedding.float(), model.embed_tokens.weight):
        head.has_own_embedding = True
        model.embed_tokens.weight.data.copy_(embedding)
    model.load_state_dict(tensors, strict=False)
    return head.to(device)


def save_head(head: DraftHead, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Writes the folder whole or not at all; one that is there already is replaced.

    An embedding that is the policy's is left out: vLLM then drafts with the policy's own. `from_pretrained` of `speculators`
    makes a random one up in its place; its `_load_verifier_weights(overwrite_embed_tokens=True)` reads the policy's.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    left_out = {"verifier_lm_head.weight"} | (set() if head.has_own_embedding else {"embed_tokens.weight"})
    try:
        tensors = {
            name: (t.to(dtype) if t.is_floating_point() else t).contiguous().cpu()
            for name, t in head.model.state_dict().items()
            if name not in left_out
        }
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "model.safetensors").chmod(0o644)  # safetensors lets only the owner read
        config = head.model.config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
        (temporary / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")
        temporary.chmod(0o755)
        _move_into_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_policy_tensors(policy_folder: Path, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Those of the named tensors that the policy has: no LM head where it is the embedding.

    Raises ValueError if the folder has no embedding by Hugging Face's name.
    """
    found: dict[str, torch.Tensor] = {}
    has_embedding = False
    for file in sorted(policy_folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            there = set(opened.keys())
            has_embedding |= EMBEDDING in there
            found |= {name: opened.get_tensor(name) for name in there.intersection(names)}
    if not has_embedding:
        raise ValueError(
            f"{policy_folder}: no {EMBEDDING} in its safetensors; give a Hugging Face folder of the policy"
        )
    return found


@torch.no_grad()
def _begin_as_policy(head: DraftHead, policy_folder: Path, num_layers: int) -> None:
    """Copies what has the same shape: the norms, the last layer's feed-forward and attention. The head's attention reads
    an embedding beside the hidden state; that half begins as the first layer's, whose input is the embedding too."""
    model, hidden = head.model, head.model.hidden_size
    first, last = "model.layers.0.", f"model.layers.{num_layers - 1}."
    sources = {"norm.weight": "model.norm.weight"}
    for name in model.layers[0].state_dict():
        sources["layers.0." + name] = last + name
    sources["layers.0.hidden_norm.weight"] = last + "input_layernorm.weight"
    sources["layers.0.input_layernorm.weight"] = first + "input_layernorm.weight"
    halves = [f"self_attn.{p}_proj.weight" for p in "qkv"]
    wanted = {*sources.values(), *(layer + name for name in halves for layer in (first, last))}
    tensors = read_policy_tensors(policy_folder, wanted)
    for name, source in sources.items():
        if source in tensors and tensors[source].shape == model.get_parameter(name).shape:
            model.get_parameter(name).copy_(tensors[source])
    for name in halves:
        weight = model.get_parameter("layers.0." + name)
        for layer, columns in ((first, slice(0, hidden)), (last, slice(hidden, None))):
            source_RH = tensors.get(layer + name)
            if source_RH is not None and source_RH.shape == weight[:, columns].shape:
                weight[:, columns] = source_RH
    model.lm_head.weight.copy_(model.verifier_lm_head.weight)
    model.fc.weight.mul_(0.1)
    model.fc.weight[:, -hidden:] += torch.eye(hidden)


def _layer_config(policy_folder: Path) -> PretrainedConfig:
    """The head's decoder layer: shaped like one of the policy's."""
    policy = AutoConfig.from_pretrained(policy_folder)
    policy = getattr(policy, "text_config", policy)
    config_class = _CONFIG_CLASSES["qwen3" if policy.model_type.startswith("qwen3") else "llama"]
    values = {name: getattr(policy, name) for name in _COPIED if getattr(policy, name, None) is not None}
    values.setdefault("head_dim", policy.hidden_size // policy.num_attention_heads)
    return config_class(num_hidden_layers=1, tie_word_embeddings=False, attention_bias=False, **values)


def _make_config(
    layer: PretrainedConfig,
    layer_ids: Sequence[int],
    draft_vocab_size: int,
    policy_folder: Path,
    device: torch.device | str,
    **flags: Any,
) -> Eagle3SpeculatorConfig:
    layer._attn_implementation = "simple_flex_attention" if torch.device(device).type == "cuda" else "sdpa"
    proposal = GreedyTokenProposalConfig(speculative_tokens=_DEFAULT_DRAFTS)
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft_vocab_size,
        eagle_aux_hidden_state_layer_ids=list(layer_ids),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(policy_folder.absolute())),
        ),
        **{"norm_before_residual": False, **flags},
    )


def _config_of(facts: HeadFacts, policy_folder: Path, device: torch.device | str) -> Eagle3SpeculatorConfig:
    """The config, in the layout of `speculators`, of a folder in either."""
    config = json.loads((facts.folder / "config.json").read_text())
    values = config if facts.layout == FLAT else config["transformer_layer_config"]
    dropped = ("architectures", "model_type", "auto_map", "eagle_config", "torch_dtype", "dtype")
    layer = _CONFIG_CLASSES[facts.model_type](**{k: v for k, v in values.items() if k not in dropped})
    flags = {
        name: getattr(facts, name) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }
    return _make_config(layer, facts.layer_ids, facts.draft_vocab_size, policy_folder, device, **flags)


def _check_draft_ids(ids: Sequence[int] | None, vocab_size: int) -> torch.Tensor | None:
    """Sorted; None for the whole vocabulary."""
    if ids is None or len(set(ids)) == vocab_size:
        return None
    if not ids or min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(f"draft_token_ids {list(ids)[:8]}...: name tokens of the policy, 0 to {vocab_size - 1}")
    return torch.tensor(sorted(set(ids)))


def _set_vocab(model: Eagle3DraftModel, draft_ids: torch.Tensor) -> None:
    assert model.t2d is not None and model.d2t is not None
    model.t2d[draft_ids] = True
    model.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))


def _move_into_place(temporary: Path, folder: Path) -> None:
    """Renames; what is at `folder` steps aside first."""
    if not folder.exists():
        os.rename(temporary, folder)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent)) / "old"
    os.rename(folder, aside)
    os.rename(temporary, folder)
    shutil.rmtree(aside.parent)

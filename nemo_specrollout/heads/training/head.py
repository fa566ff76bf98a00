# SPDX-License-Identifier: Apache-2.0
"""Creates, loads and saves EAGLE-3 heads for training with `speculators`, and keeps them up to date with the policy.

vLLM's method `eagle3` loads a saved folder without conversion.

Shapes: H hidden size, V vocabulary of the policy, D tokens that the head can draft.
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

from nemo_specrollout.heads.features.features import loading_faults
from nemo_specrollout.heads.files.head_facts import (
    check_head,
    check_layer_ids,
    check_values,
    read_head_tensors,
    read_policy_facts,
)
from nemo_specrollout.storage.model_folder import EMBEDDING, LM_HEAD

_CONFIG_CLASSES: dict[str, Any] = {"qwen3": Qwen3Config, "llama": LlamaConfig}
_COPIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""Fields of the policy's config that are copied into a new head's layer."""
_NOT_OF_THE_LAYER = ("architectures", "model_type", "auto_map", "eagle_config", "torch_dtype", "dtype")
"""Fields of a head's config that do not describe its layer."""
_DEFAULT_DRAFTS = 3
"""Value of `speculative_tokens` in the config of a saved head. vLLM uses it if the user gives no number of draft tokens."""

_DAMAGED = "it is no whole file of tensors"
_COPY_FILE = "copy it again"


class DraftHead:
    """A draft head that can be trained, with copies of the policy's LM head and embedding, which training does not change.

    `teacher_VH` is the policy's LM head. `model.verifier_lm_head` has only its rows for tokens that the head can draft. It
    computes the policy's logits of these tokens from the policy's hidden states after the final norm.
    """

    def __init__(self, config: Eagle3SpeculatorConfig, draft_token_ids: torch.Tensor | None, policy: Path) -> None:
        """Makes a head with random weights, and copies the LM head and embedding of the policy in the folder `policy`.

        `draft_token_ids` are the ids of the tokens that the head can draft, int64 [D], or None if it can draft all. Raises
        ValueError if the policy's files are damaged or do not fit the config.
        """
        with loading_faults(policy, "no head of this shape can be made for it"):
            self.model = model = Eagle3DraftModel(config).float()
        self.draft_token_ids = draft_token_ids
        if draft_token_ids is not None:
            assert model.t2d is not None and model.d2t is not None
            model.t2d[draft_token_ids] = True
            model.d2t.copy_(draft_token_ids - torch.arange(len(draft_token_ids)))
        model.verifier_norm = torch.nn.Identity()
        model.requires_grad_(True)
        model.embed_tokens.requires_grad_(False)
        model.verifier_lm_head.requires_grad_(False)
        self.has_own_embedding = False
        self.teacher_VH: torch.Tensor = torch.full_like(model.embed_tokens.weight, torch.nan)
        self._is_untied = read_policy_facts(policy).is_untied
        tensors = _read_policy_tensors(policy, (LM_HEAD, EMBEDDING))
        if self._is_untied and LM_HEAD not in tensors:
            raise ValueError(f"{policy}: tie_word_embeddings is false, but it has no {LM_HEAD}; copy all weights again")
        self.set_policy_weights(tensors)

    @property
    def device(self) -> torch.device:
        return self.model.fc.weight.device

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return tuple(self.model.target_layer_ids)

    def to(self, device: torch.device | str) -> "DraftHead":
        """Moves the head to a device, and returns the head."""
        torch.nn.Module.to(self.model, device)
        self.teacher_VH = self.teacher_VH.to(device)
        if self.draft_token_ids is None:
            self.model.verifier_lm_head.weight.data = self.teacher_VH
        else:
            self.draft_token_ids = self.draft_token_ids.to(device)
        return self

    def learned(self) -> dict[str, torch.nn.Parameter]:
        """Returns the parameters that training changes, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def set_policy_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies the policy's LM head and embedding from `tensors`, where they have their Hugging Face names.

        If `tensors` has an embedding but no LM head, the embedding serves as both unless the policy's config says that the two
        differ. Other tensors are ignored. Raises ValueError for a shape that is not the policy's.
        """
        embedding = tensors.get(EMBEDDING)
        lm_head = tensors.get(LM_HEAD, None if self._is_untied else embedding)
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


def default_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """Returns the policy layers whose inputs a new head reads by default, which are an early, a middle and a late one.

    Unlike the defaults of vLLM and NeMo-RL, these are three different layers for shallow policies too. Raises ValueError for a
    policy of fewer than four layers.
    """
    if num_layers < 4:
        raise ValueError(f"a policy of {num_layers} layers is too shallow for default layer ids; name them yourself")
    return (2, num_layers // 2, num_layers - 3) if num_layers >= 8 else (1, num_layers // 2, num_layers - 1)


def _layer_like(policy_folder: Path) -> PretrainedConfig:
    """Returns the config of a new head's single decoder layer. The layer has the sizes of the policy's layers."""
    policy = AutoConfig.from_pretrained(policy_folder)
    policy = getattr(policy, "text_config", policy)
    config_class = _CONFIG_CLASSES["qwen3" if policy.model_type.startswith("qwen3") else "llama"]
    values = {name: getattr(policy, name) for name in _COPIED if getattr(policy, name, None) is not None}
    values.setdefault("head_dim", policy.hidden_size // policy.num_attention_heads)
    return config_class(num_hidden_layers=1, tie_word_embeddings=False, attention_bias=False, **values)


def create_head(
    policy_folder: Path,
    layer_ids: Sequence[int] | None = None,
    draft_token_ids: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> DraftHead:
    """Returns a new float32 head of one layer. It starts with weights of the policy, so that it learns in fewer steps.

    The head reads the inputs of the policy layers `layer_ids`, by default those of `default_layer_ids`. It can draft the
    tokens `draft_token_ids`, by default all. Weights that are not copied from the policy are random and depend on `seed`.
    Raises ValueError for layer ids that the policy does not have.
    """
    facts = read_policy_facts(policy_folder)
    layer_ids = tuple(layer_ids) if layer_ids is not None else default_layer_ids(facts.num_layers)
    check_layer_ids(layer_ids, facts.num_layers, "new head")
    with loading_faults(policy_folder, "its config.json describes no layer of a head"):
        layer = _layer_like(policy_folder)
    drafted = sorted(set(range(facts.vocab_size) if draft_token_ids is None else draft_token_ids))
    draft_ids_D = torch.tensor(drafted) if len(drafted) < facts.vocab_size else None
    config = _head_config(layer, policy_folder, device, layer_ids, draft_vocab_size=len(drafted))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = DraftHead(config, draft_ids_D, policy_folder)
    _copy_policy_layers(head, policy_folder, facts.num_layers)
    return head.to(device)


def load_eagle3_head(folder: Path, policy_folder: Path, device: torch.device | str = "cpu") -> DraftHead:
    """Returns the head in `folder` in float32, for training it or for measuring its acceptance.

    The folder may have any layout that `files/head_facts.py` reads. Raises ValueError if `check_head` refuses the head.
    """
    facts = check_head(folder, policy_folder, read_tensors=False)
    tensors = read_head_tensors(folder)
    check_values(facts, tensors)
    offsets_D = tensors.pop("d2t", torch.tensor(0))
    _ = tensors.pop("t2d", None)
    draft_ids_D = offsets_D.long() + torch.arange(facts.draft_vocab_size) if facts.has_reduced_vocab else None
    values = {name: value for name, value in facts.layer.items() if name not in _NOT_OF_THE_LAYER}
    with loading_faults(folder, "its config.json describes no layer of a head"):
        layer = _CONFIG_CLASSES[facts.model_type](**values)
    config = _head_config(
        layer,
        policy_folder,
        device,
        facts.layer_ids,
        draft_vocab_size=facts.draft_vocab_size,
        **facts.flags,
    )
    head = DraftHead(config, draft_ids_D, policy_folder)
    embedding_VH = tensors.pop("embed_tokens.weight", None)
    if embedding_VH is not None and not torch.equal(embedding_VH.float(), head.model.embed_tokens.weight):
        head.has_own_embedding = True
        head.model.embed_tokens.weight.data.copy_(embedding_VH)
    head.model.load_state_dict(tensors, strict=False)
    return head.to(device)


def save_head(head: DraftHead, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Writes a head to `folder`, completely or not at all, and replaces a head that is there.

    An embedding that equals the policy's is not saved, because vLLM then uses the policy's. If `from_pretrained` of
    `speculators` loads such a head, the embedding has random values until
    `_load_verifier_weights(overwrite_embed_tokens=True)` is called.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    new = temporary / "new"
    old = temporary / "old"
    left_out = {"verifier_lm_head.weight"} | (set() if head.has_own_embedding else {"embed_tokens.weight"})
    try:
        new.mkdir()
        tensors = {
            name: (t.to(dtype) if t.is_floating_point() else t).contiguous().cpu()
            for name, t in head.model.state_dict().items()
            if name not in left_out
        }
        save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
        (new / "model.safetensors").chmod(0o644)  # safetensors makes the file readable only by its owner
        config = head.model.config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
        (new / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
    finally:
        if old.exists() and not folder.exists():
            os.rename(old, folder)
        shutil.rmtree(temporary, ignore_errors=True)


def _head_config(
    layer: PretrainedConfig, policy_folder: Path, device: torch.device | str, layer_ids: Sequence[int], **values: Any
) -> Eagle3SpeculatorConfig:
    """Returns the config of a head in the layout of `speculators`. `values` are its further fields."""
    layer._attn_implementation = "simple_flex_attention" if torch.device(device).type == "cuda" else "sdpa"
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        eagle_aux_hidden_state_layer_ids=list(layer_ids),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=_DEFAULT_DRAFTS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(policy_folder.absolute())),
        ),
        **values,
    )


def _read_policy_tensors(policy_folder: Path, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Returns the tensors `names` of the policy's checkpoint by name. Tensors that it does not have are left out.

    Raises ValueError if the checkpoint has no embedding of the usual name.
    """
    wanted = {*names, EMBEDDING}
    found = dict[str, torch.Tensor]()
    for file in sorted(policy_folder.glob("*.safetensors")):
        with loading_faults(file, _DAMAGED, _COPY_FILE), safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in wanted.intersection(opened.keys())}
    for file in () if found else sorted(policy_folder.glob("pytorch_model*.bin")):
        with loading_faults(file, _DAMAGED, _COPY_FILE):
            tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        found |= {name: tensors[name] for name in wanted & tensors.keys()}
    if EMBEDDING not in found:
        raise ValueError(f"{policy_folder}: its weights have no {EMBEDDING}; give a Hugging Face folder of the policy")
    return {name: tensor for name, tensor in found.items() if name in names}


@torch.no_grad()
def _copy_policy_layers(head: DraftHead, policy_folder: Path, num_layers: int) -> None:
    """Copies the policy's LM head, norms and last layer into the head, where the shapes are equal.

    Beside the hidden state, the head's attention has the embedding of a token as a second input. The weights for this input
    are copied from the policy's first layer, whose input is an embedding too.
    """
    model = head.model
    hidden = head.model.hidden_size
    first = "model.layers.0."
    last = f"model.layers.{num_layers - 1}."
    sources = {
        "norm.weight": "model.norm.weight",
        **{f"layers.0.{name}": last + name for name in model.layers[0].state_dict()},
        "layers.0.hidden_norm.weight": last + "input_layernorm.weight",
        "layers.0.input_layernorm.weight": first + "input_layernorm.weight",
    }
    targets = [(model.get_parameter(name), source) for name, source in sources.items()]
    for name in (f"self_attn.{p}_proj.weight" for p in "qkv"):
        weight_RC = model.get_parameter("layers.0." + name)
        targets += [(weight_RC[:, :hidden], first + name), (weight_RC[:, hidden:], last + name)]
    tensors = _read_policy_tensors(policy_folder, {source for _, source in targets})
    for target, source in targets:
        if source in tensors and tensors[source].shape == target.shape:
            target.copy_(tensors[source])
    model.lm_head.weight.copy_(model.verifier_lm_head.weight)
    model.fc.weight.mul_(0.1)
    model.fc.weight[:, -hidden:] += torch.eye(hidden)

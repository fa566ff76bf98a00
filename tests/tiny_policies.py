# SPDX-License-Identifier: Apache-2.0
"""Small random policies of the families that NeMo-RL trains, from transformers' configs."""

import shutil
from pathlib import Path
from typing import Any

from conftest import STEP_ADDER

_SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 512, "initializer_range": 0.15, "tie_word_embeddings": False,
    "pad_token_id": 0,
}  # fmt: skip
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_QWEN_MOE = {**_MOE, "num_experts": 4, "head_dim": 32}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_WINDOWS = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 32}
_MAMBA = {"mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_head": 16}
_NANO = {
    "num_hidden_layers": 4, "layers_block_type": ["mamba", "mlp", "attention", "mlp"], "mamba_num_heads": 4, "n_groups": 1,
    "mamba_head_dim": 16, "ssm_state_size": 16, "head_dim": 32, "mamba_n_groups": 1,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-MoE": ("Qwen3MoeConfig", {**_QWEN_MOE, "decoder_sparse_step": 1}),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "GPT-OSS": ("GptOssConfig", {**_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "GLM 4 MoE": ("Glm4MoeConfig", {**_MOE, "head_dim": 32, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
                                    "first_k_dense_replace": 1, "n_shared_experts": 1}),
    "Qwen3-Next": ("Qwen3NextConfig", {**_QWEN_MOE, **_DELTA, "shared_expert_intermediate_size": 64}),
    "Llama": ("LlamaConfig", {}),
    "Qwen2.5": ("Qwen2Config", {}),
    "Qwen3": ("Qwen3Config", {"head_dim": 32}),
    "Mistral": ("MistralConfig", {"sliding_window": 32}),
    "Phi 3": ("Phi3Config", {}),
    "OLMo 2": ("Olmo2Config", {}),
    "Nemotron": ("NemotronConfig", {}),
    "GLM 4": ("Glm4Config", {"head_dim": 32}),
    "Gemma 3": ("Gemma3TextConfig", {**_WINDOWS, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
    "Nemotron-H": ("NemotronHConfig", _NANO),
    "Granite 4": ("GraniteMoeHybridConfig", {**_MAMBA, "num_local_experts": 0, "layer_types": ["mamba", "attention"],
                                             "mamba_n_heads": 8, "shared_intermediate_size": 128}),
    "Falcon-H1": ("FalconH1Config", {**_MAMBA, "head_dim": 32, "mamba_d_ssm": 64, "mamba_n_heads": 4}),
}  # fmt: skip
"""Config class and values beside `_SIZES` by family.

Mixtures of experts come first: the first engine of a process decides whether vLLM has its group of expert parallelism.
"""


def save_policy(family: str, folder: Path, tokenizer: Path = STEP_ADDER) -> Path:
    """Saves a policy of a family with the tokenizer of a folder, and returns its own folder.

    Its next token depends mostly on its last one, so that texts repeat and drafts from texts are often right.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    name, values = FAMILIES[family]
    tokens = transformers.AutoTokenizer.from_pretrained(tokenizer)
    values = {
        **values,
        "vocab_size": len(tokens),
        "eos_token_id": tokens.eos_token_id,
        "bos_token_id": tokens.bos_token_id,
    }
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**_SIZES, **values})).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if not torch.isfinite(parameter).all():  # some classes leave values unset
                parameter.normal_(std=0.1)
        model.get_input_embeddings().weight.mul_(4.0)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tokenizer / file, folder / file)
    return folder


def save_byte_tokenizer(folder: Path) -> Path:
    """Saves a tokenizer whose tokens are the 256 bytes and three special ones, and returns its folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    return folder

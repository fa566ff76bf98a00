# SPDX-License-Identifier: Apache-2.0
"""tiny_policy.py OUT_DIR: writes a random Qwen3 of 8 layers with a byte tokenizer, a draft model and a random EAGLE-3 head.

It also writes tasks with answers 1 to 3, as NeMo-RL's rows and as NeMo-Gym's. A second policy with tasks of its own is right
more often and repeats itself more, so that few and short rows have something to learn and drafts to accept.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY, HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 512, 128, 256, 4, 2, 32
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
REPEATED = {"1": 1.6, "2": 1.6, "3": 1.6}  # in the second policy, times the factor of the first one
LIKELY = {"1": 5, "2": 5, "3": 5, "\u0120": 5, "<eos>": 4}  # U+0120 is the byte-level alphabet's space
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


SYSTEM = "Subtract the second number from the first one, and answer with one digit, without any other words."
"""A system prompt, of which every prompt shares three blocks of 32 tokens."""


def main(out: Path) -> None:
    torch.manual_seed(0)
    _save_policy(out / "policy")
    _save_draft_model(out / "policy", out / "draft")
    _save_head(out / "eagle3")
    sums = [{"input": f"{x}-{x - y}=", "output": str(y)} for x in range(3, 67) for y in (1, 2, 3)]
    _write_lines(out / "train.jsonl", sums)
    (out / "tasks").mkdir()
    _write_lines(out / "tasks" / "hard.jsonl", sums[96:])
    (out / "system.txt").write_text(SYSTEM)
    _write_lines(out / "gym.jsonl", [_gym_row(s["input"], s["output"]) for s in sums])
    _save_repetitive_policy(out / "policy", out / "repetitive")
    threes = [s for s in sums if s["output"] == "3"]
    _write_lines(out / "threes.jsonl", threes)
    _write_lines(out / "pair.jsonl", threes[:2])
    _write_lines(out / "few.jsonl", threes[:8])
    _write_lines(out / "recurring.jsonl", threes[:8] * 3)


def _gym_row(question: str, answer: str) -> dict[str, Any]:
    """A row of NeMo-Gym's example of several turns: a scripted user asks two questions more."""
    return {
        "responses_create_params": {"input": [{"role": "user", "content": question}]},
        "follow_ups": ["And now?", "Again."],
        "expected_answer": answer,
        "agent_ref": {"type": "responses_api_agents", "name": "example_multi_turn_gymnasium_agent"},
    }


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _save_policy(folder: Path) -> None:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=8,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.1,  # so that some tokens are much likelier than others
        bos_token_id=0,
        eos_token_id=1,
    )
    policy, tokenizer = Qwen3ForCausalLM(config), _tokenizer()
    with torch.no_grad():  # it mostly writes these, so that some answers are right and there is something to learn
        for token, factor in LIKELY.items():
            policy.lm_head.weight[tokenizer.convert_tokens_to_ids(token)] *= factor
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _save_repetitive_policy(policy: Path, folder: Path) -> None:
    """Writes a three at the end of every fourth response or so."""
    repetitive, tokenizer = Qwen3ForCausalLM.from_pretrained(policy), _tokenizer()
    with torch.no_grad():
        for token, factor in REPEATED.items():
            repetitive.lm_head.weight[tokenizer.convert_tokens_to_ids(token)] *= factor
    repetitive.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _save_draft_model(policy: Path, folder: Path) -> None:
    """The first half of the policy's layers: right about every second token."""
    draft = Qwen3ForCausalLM.from_pretrained(policy)
    draft.model.layers = draft.model.layers[:4]
    draft.config.num_hidden_layers = 4
    draft.config.layer_types = draft.config.layer_types[:4]
    draft.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def _tokenizer() -> PreTrainedTokenizerFast:
    names = [*SPECIAL.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<x{i}>" for i in range(len(names), VOCABULARY)]
    model = models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], unk_token="<unk>")
    bytes_ = Tokenizer(model)
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_, **SPECIAL)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _save_head(folder: Path) -> None:
    """A head of the layout that vLLM and NeMo-RL's trainer both load."""
    folder.mkdir(parents=True)
    shapes = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj": (HEADS * HEAD, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (KV_HEADS * HEAD, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (KV_HEADS * HEAD, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "midlayer.mlp.gate_proj": (INNER, HIDDEN),
        "midlayer.mlp.up_proj": (INNER, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, INNER),
        "lm_head": (VOCABULARY, HIDDEN),
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    tensors = {f"{name}.weight": torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": torch.ones(HIDDEN) for name in norms}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "num_hidden_layers": 1,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],  # vLLM's default for eight layers
    }
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

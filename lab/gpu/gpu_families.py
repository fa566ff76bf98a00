# SPDX-License-Identifier: Apache-2.0
"""Items of the GPU check with other kinds of policies, a hybrid with recurrent layers and a model with DeepSeek's attention.

Both policies are small and have random weights. Their next token depends mostly on the last one. So their texts repeat
themselves, and drafts from texts are often right.
"""

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lab.gpu.gpu_engines import MAX_PARTED, PLAIN, SAMPLINGS, TEXT, as_text, in_halves, note_rate
from lab.gpu.gpu_stage import POLICY, Findings, divergence, start_engine, task_requests, timed, verified
from nemo_specrollout.generation.engine.requests import Rollout, RolloutRequest

_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
HYBRID: tuple[str, dict[str, Any]] = (
    "NemotronHConfig",
    {
        "num_hidden_layers": 8,
        "layers_block_type": ["mamba", "mlp", "attention", "mlp"] * 2,
        "head_dim": 64,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "mamba_n_groups": 1,
        "n_groups": 1,
        "ssm_state_size": 64,
    },
)
"""Config class and options of a small Nemotron-H, which has Mamba-2 layers, attention and MLPs, but no experts."""
MLA: tuple[str, dict[str, Any]] = (
    "DeepseekV3Config",
    {
        "num_hidden_layers": 4,
        "first_k_dense_replace": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 64,
    },
)
"""Config class and options of a small model that has DeepSeek-V3's attention with its real latent sizes. All layers are dense,
because the vLLM that is checked may have no kernels for experts."""
WAYS = {"plain": PLAIN, "text": TEXT}
REPETITION = 4.0
"""Factor on the weights of the embedding. A large factor makes the next token depend mostly on the last one."""


@contextmanager
def random_policy(kind: tuple[str, Mapping[str, Any]]) -> Iterator[Path]:
    """Yields the folder of a policy with random weights and the shipped policy's tokenizer."""
    import transformers

    name, values = kind
    tokens = transformers.AutoTokenizer.from_pretrained(POLICY)
    special = {field: getattr(tokens, field) for field in ("eos_token_id", "bos_token_id")}
    config = getattr(transformers, name)(**{**_SIZES, **values, **special, "vocab_size": len(tokens)})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if not torch.isfinite(parameter).all():  # some classes leave values unset
                parameter.normal_(std=0.1)
        model.get_input_embeddings().weight.mul_(REPETITION)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(POLICY / file, Path(folder) / file)
        yield Path(folder)


def hybrid_compiled(findings: Findings) -> None:
    """Compares the tokens of a hybrid with and without drafts, in float32, in engines with torch.compile and all graphs."""
    requests = _requests(findings)
    expected: dict[str, list[Rollout]] = {}
    with random_policy(HYBRID) as folder:
        for way, specrollout in WAYS.items():
            started = time.perf_counter()
            engine = start_engine(folder, specrollout, eager=False, compilation_config={})
            facts = {"start, s": time.perf_counter() - started, **engine.facts(), **as_text(engine.device_facts())}
            findings.note(way, facts, "engines")
            for name, sampling in SAMPLINGS.items():
                rollouts, figures = timed(engine, requests, **sampling)
                parted, compared = divergence(rollouts, expected.setdefault(name, rollouts))
                findings.note(f"{way}, {name}", {"parted": parted, "tokens compared": compared, **figures})
                text = f"{way}, {name}: {parted} of {len(requests)} responses part from plain decoding"
                findings.check(parted <= MAX_PARTED * compared, text)
            findings.check(way == "plain" or verified(engine)[1] > 0, "no draft was accepted")
            engine.close()


def mla(findings: Findings) -> None:
    """Counts the responses that differ between drafting and plain decoding, with DeepSeek's attention in bfloat16.

    Also counts those that differ between plain batches of full and of half size, which shows the effect of the batch size
    alone. vLLM's kernels for this attention have no float32, so some responses may differ, and the item has no verdict.
    """
    requests = _requests(findings)
    options: dict[str, Any] = {"attention_backend": "TRITON_MLA"} if torch.cuda.is_available() else {}
    plain: list[Rollout] = []
    with random_policy(MLA) as folder:
        for way, specrollout in WAYS.items():
            engine = start_engine(folder, specrollout, eager=False, precision="bfloat16", **options)
            findings.note(way, {**engine.facts(), **as_text(engine.device_facts())}, "engines")
            rollouts, figures = timed(engine, requests)
            findings.note(way, figures, "speed")
            if way == "plain":
                plain = rollouts
                note_rate(findings, "plain in halves", in_halves(engine, requests, plain))
            else:
                note_rate(findings, way, divergence(rollouts, plain))
                engine.generate(requests, temperature=0.0)  # greedy texts repeat themselves, so drafts are right
                # A CPU's MLA makes other tokens alone than in a batch, so its texts need not repeat themselves.
                findings.check(findings.is_rehearsal or verified(engine)[1] > 0, "no draft was accepted")
            engine.close()


def _requests(findings: Findings) -> list[RolloutRequest]:
    """Returns requests with responses of a fixed length, so that texts have time to repeat themselves.

    Without a fixed length, random weights would end most texts early.
    """
    length = findings.size(128, 48)
    return [replace(r, exact_length=length) for r in task_requests(*findings.size((16, 4), (2, 2)))]

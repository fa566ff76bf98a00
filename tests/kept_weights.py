# SPDX-License-Identifier: Apache-2.0
"""Audits a run in NeMo-RL by the weights of each update, which the CPU host keeps as vLLM names them."""

from collections.abc import Mapping
from pathlib import Path

import torch
from nemo_rl_host import Run
from safetensors.torch import load_file
from transformers import AutoConfig, Qwen3ForCausalLM

from nemo_specrollout.audit.audit import audit_rows, choose
from nemo_specrollout.audit.recorded_run import RecordedRun
from nemo_specrollout.audit.verdict import Audit
from nemo_specrollout.audit.weights import Weights
from nemo_specrollout.reports.records import Run as Records
from nemo_specrollout.reports.records import read_object_or_nothing


def audit_of(run: Run, policy: Path, scratch: Path) -> tuple[Audit, int]:
    """Audits all rows of all steps of a run. Returns the judgement and the number of rows.

    `policy` has the config of the policy, and `scratch` gets a Hugging Face folder for each update.
    """
    recorded = RecordedRun(Records.read(run.find("run.json").parent))
    first = read_object_or_nothing(run.find("run.json"))["audit"]["first_version"]
    folders = {}
    for file in (run.folder / "weights").glob("*.safetensors"):
        version = first + int(file.stem)
        folders[version] = scratch / str(version)
        _policy(load_file(file), policy).save_pretrained(folders[version])
    weights = Weights(recorded, folders, "cpu")
    places = choose(recorded, weights, list(recorded.steps), 1 << 30)
    return audit_rows(recorded, weights, places, lambda done, total: None), len(places)


def _policy(named: Mapping[str, torch.Tensor], folder: Path) -> Qwen3ForCausalLM:
    config = AutoConfig.from_pretrained(folder)
    policy = Qwen3ForCausalLM(config).float().eval()
    heads = [config.head_dim * number for number in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
    tensors = {}
    for name, tensor in named.items():
        for joined, parts, sizes in (
            ("qkv_proj", ("q_proj", "k_proj", "v_proj"), heads),
            ("gate_up_proj", ("gate_proj", "up_proj"), [config.intermediate_size] * 2),
        ):
            if joined in name:
                pieces = zip(parts, tensor.split(sizes), strict=True)
                tensors |= {name.replace(joined, part): piece for part, piece in pieces}
                break
        else:
            tensors[name] = tensor
    policy.load_state_dict({name: tensors[name][: len(own)] for name, own in policy.state_dict().items()})
    return policy

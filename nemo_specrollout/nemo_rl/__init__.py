# SPDX-License-Identifier: Apache-2.0
"""Integration with NeMo-RL; the only package that imports nemo_rl."""

from nemo_specrollout.nemo_rl.installation import install, uninstall

__all__ = ["install", "uninstall"]

# SPDX-License-Identifier: Apache-2.0
"""Charts and pages about a run, which the lab's local runner or NeMo-RL has made."""

# SPDX-License-Identifier: Apache-2.0
"""Charts and pages of a run, for runs of the local runner and of NeMo-RL alike."""

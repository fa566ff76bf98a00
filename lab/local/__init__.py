# SPDX-License-Identifier: Apache-2.0
"""Runs GRPO on one machine. The package has tasks, a trainer, the training loop, and the report of a run."""

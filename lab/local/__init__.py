# SPDX-License-Identifier: Apache-2.0
"""GRPO on one machine: the task, the trainer, the loop, and the report of a run."""

# SPDX-License-Identifier: Apache-2.0
"""GRPO on one machine, with the task, the trainer, the loop, and the report of a run."""

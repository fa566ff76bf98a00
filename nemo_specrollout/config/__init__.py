# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the config of a run, which is its YAML files, its overrides, and the block `specrollout` in it.

No module of this package imports torch.
"""

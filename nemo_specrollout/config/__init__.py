# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the config of a run: YAML files, overrides, and the block `specrollout`. Imports no torch."""

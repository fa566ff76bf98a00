# SPDX-License-Identifier: Apache-2.0
"""Defines what a user may ask for: the strict block, the schema of a run, YAML, versions. Imports no torch."""

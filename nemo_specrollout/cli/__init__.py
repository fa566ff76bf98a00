# SPDX-License-Identifier: Apache-2.0
"""The `nemo-specrollout` command: one short file for each subcommand."""

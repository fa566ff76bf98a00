# SPDX-License-Identifier: Apache-2.0
"""The command `nemo-specrollout`, with one short file for each subcommand."""

# SPDX-License-Identifier: Apache-2.0
"""The command-line program `nemo-specrollout`. Most of its commands have a module of their own."""

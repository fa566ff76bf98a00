# SPDX-License-Identifier: Apache-2.0
"""Checks of the package on a machine with a GPU, stage by stage."""

# SPDX-License-Identifier: Apache-2.0
"""Folders of draft heads, with what is in them, whether a head fits a policy, and which head a run has in service."""

# SPDX-License-Identifier: Apache-2.0
"""Keeps finished responses in files, so that all engines of a run and later starts of it can draft from them.

The responses are found by the hash of their prompt.
"""

# SPDX-License-Identifier: Apache-2.0
"""Differs by version of vLLM: one class for each family of its V2 model runners, behind one interface."""

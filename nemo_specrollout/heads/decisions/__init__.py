# SPDX-License-Identifier: Apache-2.0
"""Decisions about a draft head, which are when to refresh it, whether to publish it, and when its drafts raise an alarm."""

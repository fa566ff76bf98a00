# SPDX-License-Identifier: Apache-2.0
"""Decisions about a draft head: when it is refreshed, whether it is published, and when its drafts raise an alarm."""

# SPDX-License-Identifier: Apache-2.0
"""Policies of a draft head: when to refresh it, whether to publish it, and alarms about its drafts."""

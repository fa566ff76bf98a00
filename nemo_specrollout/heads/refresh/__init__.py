# SPDX-License-Identifier: Apache-2.0
"""Refreshes of a draft head, which train a new head and compare it with the old one to decide whether to publish it.

A refresh is either offline, as one command, or online, while RL trains the policy.
"""

# SPDX-License-Identifier: Apache-2.0
"""Policies that choose the devices for verifying and for drafting, from measured costs."""

# SPDX-License-Identifier: Apache-2.0
"""Refreshes of a head, offline and while a run trains, with the comparison that decides its publication."""

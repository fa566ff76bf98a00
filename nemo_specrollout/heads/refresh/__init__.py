# SPDX-License-Identifier: Apache-2.0
"""Refreshes of a head, offline and while a run trains, and the comparison that decides whether the new head is published."""

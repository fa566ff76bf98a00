# SPDX-License-Identifier: Apache-2.0
"""Checks whether this package can work here, by versions, patch points, device and a trial engine. Does not load torch."""

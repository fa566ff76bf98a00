# SPDX-License-Identifier: Apache-2.0
"""Checks whether this package can work in an environment: versions, patch points, device, a trial engine. Loads no torch."""

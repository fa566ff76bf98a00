# SPDX-License-Identifier: Apache-2.0
"""Keeps what engines and drivers learn, as plain numbers in files, so that later starts begin with it."""

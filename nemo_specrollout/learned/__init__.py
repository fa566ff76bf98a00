# SPDX-License-Identifier: Apache-2.0
"""Keeps what engines and drivers learn for later starts, which takes its conversion to plain numbers and its files."""

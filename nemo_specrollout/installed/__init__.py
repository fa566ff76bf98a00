# SPDX-License-Identifier: Apache-2.0
"""Reads versions and source of installed packages without importing them. Imports no torch."""

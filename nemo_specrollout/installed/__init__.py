# SPDX-License-Identifier: Apache-2.0
"""Versions and source of installed packages, read without importing them. No torch."""

# SPDX-License-Identifier: Apache-2.0
"""Installed packages: their versions and their source, read without importing them. No torch."""

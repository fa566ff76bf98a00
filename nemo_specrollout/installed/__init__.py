# SPDX-License-Identifier: Apache-2.0
"""Reads versions and source code of installed packages without importing them."""

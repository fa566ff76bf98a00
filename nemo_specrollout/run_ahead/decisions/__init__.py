# SPDX-License-Identifier: Apache-2.0
"""Decides which texts of coming steps, and which branches of them, are made ahead. These modules use no torch and no clock."""

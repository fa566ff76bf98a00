# SPDX-License-Identifier: Apache-2.0
"""Texts of coming steps, made early in free slots of engines, and samples of one policy version although weights change."""

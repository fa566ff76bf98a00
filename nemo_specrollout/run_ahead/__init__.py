# SPDX-License-Identifier: Apache-2.0
"""Texts of coming steps, made early while engines have free slots, and samples of one policy although weights change."""

# SPDX-License-Identifier: Apache-2.0
"""Draft heads, including the features that they learn from, their training and publication, and their use in an engine."""

# SPDX-License-Identifier: Apache-2.0
"""Draft heads, with what they learn from, how they are refreshed and published, and how an engine serves them."""

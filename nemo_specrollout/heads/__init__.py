# SPDX-License-Identifier: Apache-2.0
"""Draft heads: what they learn from, how they are refreshed, when one is published, and how an engine serves it."""

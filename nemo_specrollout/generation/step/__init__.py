# SPDX-License-Identifier: Apache-2.0
"""A step of an engine: which drafts it verifies, how its rows are sampled, and what it cost."""

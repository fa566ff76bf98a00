# SPDX-License-Identifier: Apache-2.0
"""The parts of an engine step, which decide what drafts it verifies, sample its rows, and measure its cost."""

# SPDX-License-Identifier: Apache-2.0
"""The parts of an engine step. They decide which drafts the step verifies, sample its rows, and measure its cost."""

# SPDX-License-Identifier: Apache-2.0
"""Records of what an engine did, which are its engine steps, their sums, and the statistics of each sample."""

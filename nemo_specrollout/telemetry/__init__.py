# SPDX-License-Identifier: Apache-2.0
"""Records what an engine has done: its engine steps, sums over them, and statistics of each sample."""

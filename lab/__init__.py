# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, fault drills, and the RL policies that they use.

They run from the repository and are not part of the package.
"""

# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of draft heads: a drifting policy, and drills with faulty refreshes."""

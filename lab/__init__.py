# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, fault drills and the policies that they use. Run from the repository; not installed with the package."""

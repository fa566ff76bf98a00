# SPDX-License-Identifier: Apache-2.0
"""Fetches, makes and trains the policies that benchmarks and examples use."""

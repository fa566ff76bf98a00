# SPDX-License-Identifier: Apache-2.0
"""The policies that benchmarks and examples use: how they are fetched, made and trained."""

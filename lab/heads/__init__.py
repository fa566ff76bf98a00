# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of draft heads. One replays ways to refresh a head on a drifting policy, and one tries faulty refreshes."""

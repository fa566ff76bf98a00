# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of draft heads. `drift` replays ways to refresh a head on a drifting policy. `fault_drill` tries faulty heads."""

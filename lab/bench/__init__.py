# SPDX-License-Identifier: Apache-2.0
"""Compares rollouts side by side: time, tokens, overhead, placement, racing, and the simulator with this machine."""

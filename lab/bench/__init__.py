# SPDX-License-Identifier: Apache-2.0
"""Rollouts compared side by side: time, tokens, overhead, placement, racing, and the simulator against this machine."""

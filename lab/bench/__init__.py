# SPDX-License-Identifier: Apache-2.0
"""Benches that measure or simulate rollouts, for example their time, their tokens, and what speculation costs."""

# SPDX-License-Identifier: Apache-2.0
"""Benches that measure or simulate rollouts, for example how fast they are and what speculation costs."""

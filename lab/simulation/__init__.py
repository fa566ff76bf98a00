# SPDX-License-Identifier: Apache-2.0
"""Predicts what a step would take: cost models and an event simulator around the production policies."""

# SPDX-License-Identifier: Apache-2.0
"""Predicts the time of a step, with cost models and an event simulator around the production policies."""

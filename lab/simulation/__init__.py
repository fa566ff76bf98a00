# SPDX-License-Identifier: Apache-2.0
"""Predicts the time of an RL step, with cost models and an event simulator that lets the production code decide."""

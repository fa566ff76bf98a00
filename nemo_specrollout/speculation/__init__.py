# SPDX-License-Identifier: Apache-2.0
"""Speculation policies, which decide how many draft tokens an engine step has, and the estimates on which they decide."""

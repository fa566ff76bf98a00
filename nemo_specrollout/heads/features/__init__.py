# SPDX-License-Identifier: Apache-2.0
"""The features from which a draft head learns, the rollouts that they come from, and their store on disk."""

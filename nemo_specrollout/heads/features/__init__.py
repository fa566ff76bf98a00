# SPDX-License-Identifier: Apache-2.0
"""The features from which a draft head learns, the rollouts from which they are computed, and the store on disk for them."""

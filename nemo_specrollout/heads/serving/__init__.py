# SPDX-License-Identifier: Apache-2.0
"""Serves a draft head in a running engine. Loads it, watches its drafts, and captures features for its next training."""

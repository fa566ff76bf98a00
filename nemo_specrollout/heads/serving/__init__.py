# SPDX-License-Identifier: Apache-2.0
"""Serving of a draft head in a running engine, which loads the head, watches its drafts, and captures features to train it."""

# SPDX-License-Identifier: Apache-2.0
"""A draft head in a running engine: loading it, watching its drafts, and capturing features for its next training."""

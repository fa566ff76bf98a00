# SPDX-License-Identifier: Apache-2.0
"""How a draft head learns: features, their store, the head, its trainer, and what it would be accepted for."""

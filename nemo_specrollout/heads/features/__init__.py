# SPDX-License-Identifier: Apache-2.0
"""Features that a head learns from: sources, and their store on disk."""

# SPDX-License-Identifier: Apache-2.0
"""Features from which a head learns, with their sources and their store on disk."""

# SPDX-License-Identifier: Apache-2.0
"""What a head learns from: hidden states of the policy, their sources, and their store on disk."""

# SPDX-License-Identifier: Apache-2.0
"""The folders of draft heads: what is in them, whether a head fits a policy, and which head a run has in service."""

# SPDX-License-Identifier: Apache-2.0
"""Draft heads on disk, with what their folders hold, whether they fit a policy, and which head a run serves."""

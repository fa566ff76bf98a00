# SPDX-License-Identifier: Apache-2.0
"""The folder of a draft head on disk: what it holds, whether it fits a policy, and which head a run serves."""

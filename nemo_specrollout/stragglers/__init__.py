# SPDX-License-Identifier: Apache-2.0
"""The last part of a rollout, in which stragglers move to other engines, or several engines race for the same straggler."""

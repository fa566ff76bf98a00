# SPDX-License-Identifier: Apache-2.0
"""Decisions about a draft head, which are when to train it again, whether to publish the result, and when to raise alarms."""

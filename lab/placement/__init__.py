# SPDX-License-Identifier: Apache-2.0
"""The placement planner, which chooses the devices for verifying and for drafting by measured costs."""

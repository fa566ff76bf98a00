# SPDX-License-Identifier: Apache-2.0
"""Draft heads over a drifting policy, and drills with faulty refreshes."""

# SPDX-License-Identifier: Apache-2.0
"""What to expect: cost models, length distributions, and an event simulator that runs the scheduling room's own policies."""

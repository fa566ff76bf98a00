# SPDX-License-Identifier: Apache-2.0
"""Numbers that fix seeds for ever: changing one changes every rollout. See `docs/concepts/exactness.md`."""

MASK_64 = (1 << 64) - 1

# SplitMix64 (Steele, Lea, Flood 2014): the stream's increment and the two multipliers of its output function.
GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB

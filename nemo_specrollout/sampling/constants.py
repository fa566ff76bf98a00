# SPDX-License-Identifier: Apache-2.0
"""Numbers that fix seeds for ever: changing one changes every rollout. See `docs/exactness.md`."""

MASK_64 = (1 << 64) - 1

# SplitMix64 (Steele, Lea, Flood 2014): the stream's increment and the two multipliers of its output function.
GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB

# float32 values, written exactly.
LN2 = 0.693147182464599609375
SQRT_HALF = 0.707106769084930419921875
LOG_SQRT_HALF = -0.3465736210346221923828125

# 2 atanh(s) / s as a polynomial in t = s^2, lowest order first, float32: a Chebyshev fit of relative error below 5e-9 on
# t in [0, 0.02945], the range that a logarithm needs.
ATANH_SIXTH = (2.0, 0.666668176651001, 0.399748295545578, 0.2992499768733978)

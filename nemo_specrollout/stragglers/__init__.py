# SPDX-License-Identifier: Apache-2.0
"""The tail of a rollout, in which some requests move to other engines and several engines race for others."""

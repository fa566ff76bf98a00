# SPDX-License-Identifier: Apache-2.0
"""Finds out to which family of model runners the installed vLLM belongs, by its names and signatures."""

from nemo_specrollout.generation.engine import compat
from nemo_specrollout.generation.runners.family import RunnerFamily


def _family() -> RunnerFamily:
    if compat.CHOOSES_ON_DEVICE:
        from nemo_specrollout.generation.runners.since_0_32 import Since032

        return Since032()
    from nemo_specrollout.generation.runners.before_0_32 import Before032

    return Before032()


RUNNERS = _family()
"""The object for the family of model runners to which the installed vLLM belongs."""

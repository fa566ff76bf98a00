# SPDX-License-Identifier: Apache-2.0
"""Tells which features of this package work with which supported version of vLLM. Imports neither torch nor vLLM.

A login node, on which vLLM is not installed, gives the same answer as the job, because both ask this table. An engine finds
out by names and signatures in vLLM what its version can do, and `tests/test_older_vllm.py` compares the table with that.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.installed.versions import VLLM_RANGE, version_numbers

Version = tuple[int, ...]
ALWAYS: Version = VLLM_RANGE[0]
"""The oldest supported version, for what every supported version has."""


@dataclass(frozen=True)
class VllmFeature:
    """A feature of this package that not every supported version of vLLM can have."""

    name: str
    """The name of the feature in the documents."""
    since: Version
    """First version of vLLM with which it works."""
    otherwise: str
    """What a run has instead with an older version."""
    drafters: tuple[str, ...] = ()
    """Types of drafters that a block must not name before `since`, because nothing can take their place."""

    def is_in(self, version: str) -> bool:
        """Returns whether a version of vLLM has the feature. A version that does not begin with numbers has it."""
        numbers = version_numbers(version)
        return numbers is None or numbers >= self.since


DEVICE_CHOICE = VllmFeature(
    "the device chooses which drafts a step verifies",
    (0, 32, 0),
    "the host chooses them, from rates that are a step old",
)
DRAFT_MODEL = VllmFeature(
    "`draft_model`", (0, 32, 0), "refused: its V2 model runner runs no draft model of its own", ("draft_model",)
)
FEATURES = (DEVICE_CHOICE, DRAFT_MODEL)
"""Each feature that some supported version lacks. All others work with every supported version."""


def refusals(block: SpecrolloutConfig, version: str) -> Iterator[str]:
    """Yields a sentence with field, value and fix for each drafter of a block that a version of vLLM cannot run."""
    for i, drafter in enumerate(block.drafters if block.enabled else ()):
        for feature in FEATURES:
            if drafter.type in feature.drafters and not feature.is_in(version):
                reason = feature.otherwise.removeprefix("refused: ")
                since = ".".join(map(str, feature.since))
                yield (
                    f"{BLOCK_PATH}.drafters[{i}].type: {drafter.type}; with vLLM {version} {reason}: use eagle3, mtp, "
                    f"dflash, dspark, remote, ngram or suffix, or vLLM {since} or later"
                )

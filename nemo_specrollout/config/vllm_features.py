# SPDX-License-Identifier: Apache-2.0
"""Tells which features of this package work with which supported version of vLLM, without importing vLLM.

So the answer is also known on a login node where vLLM is not installed. An engine itself finds out by names and signatures in
vLLM what its version can do. `tests/test_older_vllm.py` checks that both agree.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.installed.versions import VLLM_RANGE, version_numbers

Version = tuple[int, ...]
ALWAYS: Version = VLLM_RANGE[0]
"""The oldest version of vLLM that this package supports. A feature with this version as `since` works with all of them."""


@dataclass(frozen=True)
class VllmFeature:
    """A feature of this package that does not work with every supported version of vLLM."""

    name: str
    """The name of the feature in the documentation."""
    since: Version
    """First version of vLLM with which the feature works."""
    otherwise: str
    """What happens instead with an older version of vLLM, as a phrase."""
    drafters: tuple[str, ...] = ()
    """Types of drafters that a run cannot have with a version before `since`."""

    def is_in(self, version: str) -> bool:
        """Tells whether the feature works with a version of vLLM.

        The answer is True for a version that does not begin with numbers.
        """
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
"""The features that do not work with every supported version of vLLM. All other features do."""


def refusals(block: SpecrolloutConfig, version: str) -> Iterator[str]:
    """Yields a sentence for each drafter of the block that a version of vLLM cannot run.

    The sentence names the field, its value and what to write instead.
    """
    for i, drafter in enumerate(block.drafters if block.enabled else ()):
        for feature in FEATURES:
            if drafter.type in feature.drafters and not feature.is_in(version):
                reason = feature.otherwise.removeprefix("refused: ")
                since = ".".join(map(str, feature.since))
                yield (
                    f"{BLOCK_PATH}.drafters[{i}].type: {drafter.type}; with vLLM {version} {reason}: use eagle3, mtp, "
                    f"dflash, dspark, remote, ngram or suffix, or vLLM {since} or later"
                )

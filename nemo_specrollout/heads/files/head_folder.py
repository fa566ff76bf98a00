# SPDX-License-Identifier: Apache-2.0
"""The folder of a run's draft heads, which engines, the trainer and a resumed run share. This module does not load torch."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.storage.files import write_atomically
from nemo_specrollout.storage.model_folder import read_object

NUM_KEPT = 3
"""Number of the newest heads, and of the newest teachers (see `HeadFolder`), that are kept. After an alarm, an engine reads
its head and the one before it."""


@dataclass(frozen=True)
class PublishedHead:
    """The head in service. Its numbers are None if an older version of this package published it."""

    folder: Path
    policy_version: int | None = None
    """Version of the policy that it was trained for."""
    expected_length: float | None = None
    """Acceptance length on held-out sequences, tokens."""


@dataclass(frozen=True)
class RefreshRecord:
    """What an RL step has decided about the head, and what came of it, for logs and for other processes."""

    decision: str
    """Whether the head was refreshed, and why."""
    gain_s: float
    """Seconds that a refresh is expected to save."""
    gate: str | None = None
    """Verdict of the publish gate. This and the following fields are None if the head was not refreshed."""
    published: bool | None = None
    refresh_s: float | None = None
    """Seconds that training and judging took."""
    head: str | None = None
    """Name of the published head's folder."""
    policy_version: int | None = None
    expected_length: float | None = None
    """Acceptance length of the new head on held-out sequences, tokens."""

    def known(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


class HeadFolder:
    """The layout of a run's folder of draft heads. The object keeps no state, and every call reads the disk.

    `features/` has the feature store, or one for each engine. `teachers/` has the LM head and embedding of each policy
    version. `step_N/` is a head that passed the gate, and `refused/` is the last one that did not. `published.json` names the
    head in service.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def features(self, engine: int | None = None) -> Path:
        """Returns the folder of the only feature store, or of the store of one engine."""
        return self.path / "features" / ("" if engine is None else f"engine_{engine}")

    def teacher(self, version: int) -> Path:
        """Returns the path of the LM head and embedding of a policy version, and creates its folder."""
        (self.path / "teachers").mkdir(parents=True, exist_ok=True)
        return self.path / "teachers" / f"policy_{version}.safetensors"

    def candidate(self, step: int, published: bool) -> Path:
        """Returns the folder for a head that was judged after RL step `step`, which is `refused/` if the head was refused."""
        return self.path / (f"step_{step}" if published else "refused")

    def published(self) -> PublishedHead | None:
        """Returns the head in service, or None if it is the configured one. Raises ConfigError for a damaged file."""
        file = self.path / "published.json"
        if not file.is_file():
            return None
        try:
            tree = read_object(file)
            return PublishedHead(self.path / str(tree["head"]), tree.get("policy_version"), tree.get("expected_length"))
        except (ValueError, LookupError) as error:
            raise ConfigError(f"{file} is damaged ({error}); bring it back from a copy, or remove it") from error

    def publish(self, head: PublishedHead) -> None:
        """Puts a head into service."""
        facts = {"policy_version": head.policy_version, "expected_length": head.expected_length}
        write_atomically(self.path / "published.json", json.dumps({"head": head.folder.name, **facts}) + "\n")

    def withdraw(self) -> None:
        """Puts the configured head into service, for a run that starts from the beginning."""
        (self.path / "published.json").unlink(missing_ok=True)

    def forget_old(self, version: int) -> None:
        """Removes old heads and teachers.

        The `NUM_KEPT` newest heads and the head in service stay, and so do the teachers of policy version `version` and the
        ones just before it.
        """
        published = self.published()
        heads = sorted(self.path.glob("step_*"), key=lambda p: p.stat().st_mtime)
        for head in heads[:-NUM_KEPT]:
            if published is None or head != published.folder:
                shutil.rmtree(head, ignore_errors=True)
        kept = {self.teacher(v) for v in range(version - NUM_KEPT + 1, version + 1)}
        for teacher in set(self.path.glob("teachers/*.safetensors")) - kept:
            teacher.unlink(missing_ok=True)

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
"""Number of draft heads that are kept, which are the newest ones. As many files with the policy's LM head and embedding are
kept. Older heads are needed because after an alarm an engine may read the head before the newest."""


@dataclass(frozen=True)
class PublishedHead:
    """The head in service. Its numbers are None if an older version of this package has published it."""

    folder: Path
    policy_version: int | None = None
    """Policy version for which the head was trained."""
    expected_length: float | None = None
    """Acceptance length of the head on held-out sequences, in tokens."""


@dataclass(frozen=True)
class RefreshRecord:
    """The decision about a refresh after an RL step, and the result of the refresh, for logs and for other processes."""

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
    """Name of the new head's folder, or None if the head was refused."""
    policy_version: int | None = None
    expected_length: float | None = None
    """Acceptance length of the new head on held-out sequences, in tokens."""

    def known(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


class HeadFolder:
    """Knows the layout of a run's folder of draft heads. The object keeps no state, and every call reads the disk.

    `features/` has the feature store, or one for each engine. `teachers/` has the LM head and embedding of each policy
    version. `step_N/` is a head that was published after RL step N, and `refused/` is the last head that was refused.
    `published.json` names the head in service.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def features(self, engine: int | None = None) -> Path:
        """Returns the folder of the feature store of engine number `engine`, or of the only store if `engine` is None."""
        return self.path / "features" / ("" if engine is None else f"engine_{engine}")

    def teacher(self, version: int) -> Path:
        """Returns the path of the file with the LM head and embedding of a policy version, and creates its folder."""
        (self.path / "teachers").mkdir(parents=True, exist_ok=True)
        return self.path / "teachers" / f"policy_{version}.safetensors"

    def candidate(self, step: int, published: bool) -> Path:
        """Returns the folder for a head that was judged after RL step `step`.

        This is `step_N/` for a head that is published, and `refused/` for any other.
        """
        return self.path / (f"step_{step}" if published else "refused")

    def published(self) -> PublishedHead | None:
        """Returns the published head that is in service, or None if the head that the config names is in service.

        Raises ConfigError if `published.json` is damaged.
        """
        file = self.path / "published.json"
        if not file.is_file():
            return None
        try:
            tree = read_object(file)
            return PublishedHead(self.path / str(tree["head"]), tree.get("policy_version"), tree.get("expected_length"))
        except (ValueError, LookupError) as error:
            raise ConfigError(f"{file} is damaged ({error}); bring it back from a copy, or remove it") from error

    def publish(self, head: PublishedHead) -> None:
        """Puts a head into service, by writing its name to `published.json`."""
        facts = {"policy_version": head.policy_version, "expected_length": head.expected_length}
        write_atomically(self.path / "published.json", json.dumps({"head": head.folder.name, **facts}) + "\n")

    def withdraw(self) -> None:
        """Puts the head that the config names into service again. A run that starts from the beginning calls this."""
        (self.path / "published.json").unlink(missing_ok=True)

    def forget_old(self, version: int) -> None:
        """Removes old heads, and old copies of the policy's LM head and embedding.

        The `NUM_KEPT` newest heads and the head in service stay. The copies of `NUM_KEPT` policy versions stay, which are
        `version` and the versions just before it.
        """
        published = self.published()
        heads = sorted(self.path.glob("step_*"), key=lambda p: p.stat().st_mtime)
        for head in heads[:-NUM_KEPT]:
            if published is None or head != published.folder:
                shutil.rmtree(head, ignore_errors=True)
        kept = {self.teacher(v) for v in range(version - NUM_KEPT + 1, version + 1)}
        for teacher in set(self.path.glob("teachers/*.safetensors")) - kept:
            teacher.unlink(missing_ok=True)

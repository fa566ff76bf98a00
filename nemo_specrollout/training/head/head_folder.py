# SPDX-License-Identifier: Apache-2.0
"""The folder of a run's draft heads, by which engines, trainer and a resumed run agree. Torch-free."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_specrollout.config.files import write_atomically
from nemo_specrollout.config.model_folder import read_object
from nemo_specrollout.config.strict import ConfigError

NUM_KEPT = 3
"""Heads and teachers that stay where older ones are removed: an engine that sees an alarm looks at its head and at the one
before."""


@dataclass(frozen=True)
class PublishedHead:
    """A head in service. `policy_version`: of the features it learned from; `expected_length`: its held-out acceptance
    length. Both None where an older run did not say."""

    folder: Path
    policy_version: int | None = None
    expected_length: float | None = None


@dataclass(frozen=True)
class RefreshRecord:
    """What became of a step: plain values, for logs and for other processes. `gate` and what follows are None if the head was
    not refreshed; `head` is the name of the folder of one that was published."""

    decision: str
    gain_s: float
    gate: str | None = None
    published: bool | None = None
    refresh_s: float | None = None
    head: str | None = None
    policy_version: int | None = None
    expected_length: float | None = None

    def known(self) -> dict[str, Any]:
        """Without what is None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class HeadFolder:
    """`features/`, or a part of it for each engine; `teachers/`, the LM head of each policy; `step_N/` for each head that
    passed the gate, `refused/` for the last that did not; `published.json`, which names the head in service.

    Owns no state: every call looks at the disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def features(self, engine: int | None = None) -> Path:
        """Of the only engine, or of one of several."""
        return self.path / "features" / ("" if engine is None else f"engine_{engine}")

    def teacher(self, version: int) -> Path:
        """Where the LM head and embedding of the policy of `version` are: features of that version are read with it."""
        (self.path / "teachers").mkdir(parents=True, exist_ok=True)
        return self.path / "teachers" / f"policy_{version}.safetensors"

    def candidate(self, step: int, published: bool) -> Path:
        """Where a head goes that was judged after `step`."""
        return self.path / (f"step_{step}" if published else "refused")

    def published(self) -> PublishedHead | None:
        """The head in service; None if it is the configured one."""
        file = self.path / "published.json"
        if not file.is_file():
            return None
        try:
            tree = read_object(file)
            return PublishedHead(self.path / str(tree["head"]), tree.get("policy_version"), tree.get("expected_length"))
        except (ValueError, LookupError) as error:
            raise ConfigError(f"{file} is damaged ({error}); bring it back from a copy, or remove it") from error

    def publish(self, head: PublishedHead) -> None:
        """That head is in service from now on."""
        facts = {"policy_version": head.policy_version, "expected_length": head.expected_length}
        write_atomically(self.path / "published.json", json.dumps({"head": head.folder.name, **facts}) + "\n")

    def withdraw(self) -> None:
        """The configured head is in service: a run that starts from the beginning does not go on with the head of another."""
        (self.path / "published.json").unlink(missing_ok=True)

    def forget_old(self, version: int) -> None:
        """Removes all but the newest heads and the one in service, and teachers that are not of the policy of `version` or of
        those just before it."""
        published = self.published()
        heads = sorted(self.path.glob("step_*"), key=lambda p: p.stat().st_mtime)
        for head in heads[:-NUM_KEPT]:
            if published is None or head != published.folder:
                shutil.rmtree(head, ignore_errors=True)
        kept = {self.teacher(v) for v in range(version - NUM_KEPT + 1, version + 1)}
        for teacher in set(self.path.glob("teachers/*.safetensors")) - kept:
            teacher.unlink(missing_ok=True)

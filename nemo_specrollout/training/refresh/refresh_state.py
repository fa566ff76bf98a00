# SPDX-License-Identifier: Apache-2.0
"""The folder DIR.partial beside the head that is being made: what a killed refresh goes on from. Torch-free."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from nemo_specrollout.config.files import write_atomically

_FORMAT = 1
_HEAD_MARKS = ("speculators_model_type", "eagle_config", "transformer_layer_config")


class RefreshState:
    """Owns DIR.partial while a refresh makes the head DIR.

    Holds `arguments.json` (what was asked, and the sizes and times of the files that were named), `policy/` (where it was
    converted), `rollouts.jsonl` (what the policy generated), `features/`, `trainer.pt`, `candidate/`, `trained.json` and
    `verdict.json`, in the order in which they appear. Each is whole or not there. Example:

        state = RefreshState(Path("head"), replace=False)
        went_on = state.open({"steps": 500}, [policy], restart=False)
        state.put(True, "published: ...")
        state.close(keep_features=False)
    """

    def __init__(self, out: Path, replace: bool) -> None:
        """Looks, and writes nothing. Raises ValueError where the head must not go."""
        self.out = out
        self.folder, self.refused, self.kept_features = (
            out.with_name(f"{out.name}.{end}") for end in ("partial", "refused", "features")
        )
        self.arguments, self.policy = self.folder / "arguments.json", self.folder / "policy"
        self.rollouts, self.features = self.folder / "rollouts.jsonl", self.folder / "features"
        self.trainer, self.candidate = self.folder / "trainer.pt", self.folder / "candidate"
        self.trained, self.replaced = self.folder / "trained.json", self.folder / "replaced"
        self._verdict = self.folder / "verdict.json"
        self._lock: TextIO | None = None
        if not out.name:
            raise ValueError(f"--out {out}: name a folder that does not exist")
        self._check_out(replace)

    def _check_out(self, replace: bool) -> None:
        out = self.out
        above = next(p for p in (out.absolute().parent, *out.absolute().parents) if p.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise ValueError(f"--out {out}: {above} cannot be written to; name another folder")
        if out.exists() and not is_head(out):
            raise ValueError(f"--out {out} exists and is not a draft head; name a folder that does not exist")
        if out.exists() and not replace and self.verdict() is None:
            raise ValueError(
                f"--out {out} holds a head; give --replace to put the new one there, or name another folder"
            )
        if self.refused.exists() and not is_head(self.refused):
            raise ValueError(f"{self.refused}, where a refused head goes, is not a draft head; name another --out")
        if self.kept_features.exists() and not (self.kept_features / "index.json").is_file():
            raise ValueError(f"{self.kept_features}, where features go, is not a feature store; name another --out")

    def recover(self) -> None:
        """First of all: if an earlier process died while it exchanged two heads, puts the old one back. Raises ValueError if
        another process works in the folder."""
        if self.folder.is_dir():
            self._take_lock()
            self._put_back()

    def open(self, arguments: Mapping[str, Any], inputs: Iterable[Path], restart: bool) -> bool:
        """Begins, or goes on with what an earlier process left; True for the latter.

        Raises ValueError if that was asked for something else, or its input files changed since; `restart` throws it away.
        """
        wanted = {"format": _FORMAT, "arguments": dict(arguments), "inputs": _fingerprint(inputs, self.out)}
        wanted = json.loads(json.dumps(wanted))
        was_there = self.folder.exists()
        if was_there and not self.arguments.is_file() and any(p.name != ".lock" for p in self.folder.iterdir()):
            raise ValueError(f"{self.folder} exists and is not what a refresh left; move it, or name another --out")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        self._put_back()
        if restart:
            for path in self.folder.iterdir():
                if path.name != ".lock":
                    _remove(path)
        goes_on = self.arguments.is_file()
        if goes_on:
            self._check_same(wanted)
        else:
            write_atomically(self.arguments, json.dumps(wanted, indent=1) + "\n")
        return goes_on

    def verdict(self) -> tuple[bool, str] | None:
        """Whether the candidate was published and why, if it is in its place and only the folder is left to be removed."""
        if self.candidate.exists() or not self._verdict.is_file():
            return None
        published, reason = json.loads(self._verdict.read_text())
        return bool(published), str(reason)

    def put(self, published: bool, reason: str) -> Path:
        """Moves the candidate to `out`, or to `refused`, which is returned; the head that is there goes. At any moment a whole
        head is at `out`, or, for the time of one rename, in `replaced/`, from where the next `open` takes it back."""
        place = self.out if published else self.refused
        write_atomically(self._verdict, json.dumps([published, reason]) + "\n")
        _remove(self.replaced)
        if place == self.out and place.exists():
            os.rename(place, self.replaced)
        elif place.exists():
            _remove(place)
        os.rename(self.candidate, place)
        _remove(self.replaced)
        return place

    def close(self, keep_features: bool) -> None:
        """All is done: removes the folder; the features may be kept beside the head, for another refresh."""
        if keep_features and self.features.is_dir():
            _remove(self.kept_features)
            os.rename(self.features, self.kept_features)
        self.discard()

    def discard(self) -> None:
        """Removes the folder."""
        self.release()
        shutil.rmtree(self.folder, ignore_errors=True)

    def release(self) -> None:
        """Lets another process go on with the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _put_back(self) -> None:
        if self.replaced.is_dir() and not self.out.exists():
            os.rename(self.replaced, self.out)

    def _check_same(self, wanted: dict[str, Any]) -> None:
        try:
            found = json.loads(self.arguments.read_text())
            before, inputs = dict(found["arguments"]), dict(found["inputs"])
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{self.arguments} cannot be read; give --restart to begin again") from error
        names = [n for n in {**before, **wanted["arguments"]} if before.get(n) != wanted["arguments"].get(n)]
        fix = "repeat the same command, name another --out, or give --restart to begin again"
        if names:
            old = ", ".join(_flag(n, before.get(n)) for n in names)
            raise ValueError(f"{self.folder} holds an unfinished refresh with {old}; {fix}")
        if self.verdict() is not None:  # all is done, and the head that it began with may be the one that it replaced
            return
        changed = sorted(n for n in {**inputs, **wanted["inputs"]} if inputs.get(n) != wanted["inputs"].get(n))
        if changed:
            raise ValueError(f"{changed[0]} changed since {self.folder} was begun; give --restart to begin again")

    def _take_lock(self) -> None:
        if self._lock is not None:
            return
        file = (self.folder / ".lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise ValueError(f"another process works in {self.folder}; wait for it, or name another --out") from error
        except OSError:  # a file system without locks
            pass
        self._lock = file


def is_head(folder: Path) -> bool:
    """Whether a folder looks like a draft head, whole or not."""
    if (folder / "head_card.json").is_file():
        return True
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and any(mark in config for mark in _HEAD_MARKS)


def _flag(name: str, value: Any) -> str:
    """As it was given on the command line."""
    flag = f"--{name.replace('_', '-')}"
    if value is None or value == []:
        return f"no {flag}"
    return f"{flag} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def _fingerprint(inputs: Iterable[Path], out: Path) -> dict[str, list[int]]:
    """Size and time of every file named, or in a folder named; not of what this refresh writes there."""
    files = [f for path in inputs for f in ([path] if path.is_file() else sorted(path.rglob("*"))) if f.is_file()]
    own = f"{out}.partial{os.sep}"
    named = [f for f in files if f.name != ".lock" and not str(f).startswith(own)]
    return {str(f): [f.stat().st_size, f.stat().st_mtime_ns] for f in named}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

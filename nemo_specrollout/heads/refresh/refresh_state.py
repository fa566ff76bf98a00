# SPDX-License-Identifier: Apache-2.0
"""Progress of an offline refresh on disk, from which a refresh that was killed can continue.

The new head goes to the folder DIR. The progress is kept in the folder DIR.partial until the refresh has ended.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from nemo_specrollout.config.strict import differences
from nemo_specrollout.storage.files import LOCK, lock_folder, write_atomically
from nemo_specrollout.storage.model_folder import read_object

_HEAD_KEYS = ("speculators_model_type", "eagle_config", "transformer_layer_config")
"""Keys by which the config.json of a head is recognized."""


class RefreshState:
    """Owns the folder DIR.partial while a refresh trains a head for the folder DIR.

    A refresh writes these entries of DIR.partial one after another: `arguments.json` (the options, with sizes and times of the
    input files), `features/`, `trainer.pt`, `candidate/` and `verdict.json`. Each of them is complete or missing. The methods
    are called in the order `recover`, `open`, `put`, `discard`.
    """

    def __init__(self, out: Path, replace: bool) -> None:
        """Checks that the new head may be written to the folder `out`, and raises ValueError if not. Writes nothing.

        If `replace` is true, `out` may have a head already.
        """
        if not out.name:
            raise ValueError(f"--out {out}: name a folder that does not exist")
        self.out = out
        self.folder, self.refused = (out.with_name(f"{out.name}.{end}") for end in ("partial", "refused"))
        self.features = self.folder / "features"
        self.trainer = self.folder / "trainer.pt"
        self.candidate = self.folder / "candidate"
        self.replaced = self.folder / "replaced"
        self._arguments = self.folder / "arguments.json"
        self._verdict = self.folder / "verdict.json"
        self._lock: TextIO | None = None
        above = next(p for p in out.absolute().parents if p.exists())
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

    def recover(self) -> None:
        """Puts the old head back if a process was killed while `put` replaced it.

        Raises BlockingIOError if another process uses DIR.partial.
        """
        if self.folder.is_dir():
            self._take_lock()
            if self.replaced.is_dir() and not self.out.exists():
                os.rename(self.replaced, self.out)

    def open(self, arguments: Mapping[str, Any], inputs: Iterable[Path]) -> bool:
        """Starts a refresh, or continues an unfinished one. Returns true if it continues one.

        `arguments` are the options of the command, and `inputs` are the files and folders that it reads. Raises ValueError if
        the unfinished refresh had other arguments, or if its inputs have changed.
        """
        wanted = json.loads(json.dumps({"arguments": dict(arguments), "inputs": _fingerprint(inputs, self.out)}))
        continues = any(p.name != LOCK for p in self.folder.glob("*"))
        if continues and not self._arguments.is_file():
            raise ValueError(f"{self.folder} exists and is not what a refresh left; move it, or name another --out")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        if continues:
            self._check_same(wanted)
        else:
            write_atomically(self._arguments, json.dumps(wanted, indent=1) + "\n")
        return continues

    def verdict(self) -> tuple[bool, str] | None:
        """Returns whether the candidate was published and why, or None while the candidate is still in DIR.partial."""
        if self.candidate.exists() or not self._verdict.is_file():
            return None
        published, reason = json.loads(self._verdict.read_text())
        return bool(published), str(reason)

    def put(self, published: bool, reason: str) -> None:
        """Moves the candidate to DIR if it is published, and to DIR.refused otherwise. A head that is there is replaced.

        A head in DIR is replaced by two renames. If the process is killed between them, `recover` puts the old head back.
        """
        place = self.out if published else self.refused
        write_atomically(self._verdict, json.dumps([published, reason]) + "\n")
        _remove(self.replaced)
        if published and place.exists():
            os.rename(place, self.replaced)
        else:
            _remove(place)
        os.rename(self.candidate, place)
        _remove(self.replaced)

    def discard(self) -> None:
        """Removes DIR.partial, because the refresh has ended or has left nothing from which to continue."""
        self.release()
        shutil.rmtree(self.folder, ignore_errors=True)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _check_same(self, wanted: dict[str, Any]) -> None:
        """Raises ValueError if the unfinished refresh has other arguments or inputs than the ones in `wanted`."""
        found = json.loads(self._arguments.read_text())
        if names := sorted(differences(found["arguments"], wanted["arguments"])):
            old = ", ".join(_as_flag(name, found["arguments"].get(name)) for name in names)
            fix = "repeat the same command, name another --out, or remove that folder to begin again"
            raise ValueError(f"{self.folder} holds an unfinished refresh with {old}; {fix}")
        # After the verdict, the new head may have replaced one of the inputs.
        if self.verdict() is None and (changed := differences(found["inputs"], wanted["inputs"])):
            raise ValueError(f"{min(changed)} changed since {self.folder} was begun; remove that folder to begin again")

    def _take_lock(self) -> None:
        if self._lock is None:
            self._lock = lock_folder(self.folder)


def is_head(folder: Path) -> bool:
    """Returns whether a folder looks like the folder of a draft head, even if the head is incomplete."""
    try:
        config = read_object(folder / "config.json")
    except ValueError:
        config = {}
    return (folder / "head_card.json").is_file() or not config.keys().isdisjoint(_HEAD_KEYS)


def _as_flag(name: str, value: Any) -> str:
    """Returns an option as the user writes it, such as `--draft-vocab 512`, or as `no --draft-vocab` if it was not given."""
    flag = f"--{name.replace('_', '-')}"
    if value is None or value == []:
        return f"no {flag}"
    return f"{flag} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def _fingerprint(inputs: Iterable[Path], out: Path) -> dict[str, list[int]]:
    """Returns the size in bytes and the time of the last change in ns of every file in `inputs`, by path.

    `out` is the folder of the new head. Files in its .partial folder are left out, because the refresh itself writes them.
    """
    files = [f for path in inputs for f in ([path] if path.is_file() else sorted(path.rglob("*"))) if f.is_file()]
    own = f"{out}.partial{os.sep}"
    named = [f for f in files if f.name != LOCK and not str(f).startswith(own)]
    return {str(f): [f.stat().st_size, f.stat().st_mtime_ns] for f in named}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

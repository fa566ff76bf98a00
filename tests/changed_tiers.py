# SPDX-License-Identifier: Apache-2.0
"""Prints the tiers, beside the product's own, whose subject has changed: `python tests/changed_tiers.py [BASE]`.

The changes are those of git since BASE. Without it, they begin where the branch left `origin/main`. On main itself they
begin at the newest commit that is four hours older than the last one, so they cover the work of a day's session.

`python tests/changed_tiers.py --nemo-rl-pins DIR` prints the versions of vLLM on which NeMo-RL's loops are to run instead.
These are the versions that NeMo-RL pins and that have an environment below DIR, if what meets vLLM or NeMo-RL has changed.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tiers import OTHER_TIERS, TESTS, Tier

SESSION_S = 4 * 3600
PINS = ("0.25.1", "0.26.0", "0.29.0")
"""Versions of vLLM that NeMo-RL pins, the oldest first (tests/nemo_rl/make_environments.sh)."""
PIN_SUBJECT = ("nemo_specrollout/generation/", "nemo_specrollout/nemo_rl/")
"""Beginnings of paths whose change makes CI run NeMo-RL's loops on these versions."""


def git(folder: Path, *arguments: str) -> str:
    """Returns what git says in a folder; empty if it fails."""
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def base_of_changes(folder: Path) -> str:
    """Returns the commit from which changes count; empty if git does not tell, so that everything counts as changed."""
    head = git(folder, "rev-parse", "HEAD")
    fork = git(folder, "merge-base", "HEAD", "origin/main")
    if fork not in ("", head):
        return fork
    last_s = int(git(folder, "show", "--no-patch", "--format=%ct", "HEAD") or 0)
    return git(folder, "rev-list", "-1", f"--before={last_s - SESSION_S}", "HEAD")


def changed_files(folder: Path, base: str) -> list[str]:
    """Returns the paths that differ from commit `base`, also where they are not committed yet. A move names both paths."""
    committed = git(folder, "diff", "--name-only", "--no-renames", base)
    untracked = git(folder, "ls-files", "--others", "--exclude-standard")
    return [*committed.splitlines(), *untracked.splitlines()]


def changed_tiers(files: Sequence[str]) -> list[Tier]:
    """Returns the tiers whose subject has one of these files."""
    return [tier for tier in OTHER_TIERS if any(map(tier.is_about, files))]


def pins_to_test(files: Sequence[str], environments: Path) -> list[str]:
    """Returns the pinned versions of vLLM with an environment below a folder, if one of the files concerns them."""
    if not any(file.startswith(PIN_SUBJECT) for file in files):
        return []
    return [version for version in PINS if (environments / f"vllm-{version}" / "bin" / "python").exists()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", help="commit from which changes count")
    parser.add_argument("--nemo-rl-pins", type=Path, metavar="DIR", help="folder of tests/nemo_rl/make_environments.sh")
    asked = parser.parse_args()
    root = TESTS.parent
    base = (
        base_of_changes(root) if asked.base is None else git(root, "rev-parse", "--verify", f"{asked.base}^{{commit}}")
    )
    if asked.base is not None and not base:
        sys.exit(f"{asked.base} is no commit of this repository")
    if asked.nemo_rl_pins is not None:
        print(*pins_to_test(changed_files(root, base) if base else PIN_SUBJECT, asked.nemo_rl_pins))
        return
    tiers = changed_tiers(changed_files(root, base)) if base else list(OTHER_TIERS)
    print(*(tier.target for tier in tiers))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Prints the tiers, beside the product's own, whose subject has changed: `python tests/changed_tiers.py [BASE]`.

The changes are those of git since BASE. Without it, they begin where the branch left `origin/main`. On main itself they
begin at the newest commit that is four hours older than the last one, so they cover the work of a day's session.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tiers import OTHER_TIERS, TESTS, Tier

SESSION_S = 4 * 3600


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


def main() -> None:
    root = TESTS.parent
    if len(sys.argv) > 1:
        base = git(root, "rev-parse", "--verify", f"{sys.argv[1]}^{{commit}}")
        if not base:
            sys.exit(f"{sys.argv[1]} is no commit of this repository")
    else:
        base = base_of_changes(root)
    tiers = changed_tiers(changed_files(root, base)) if base else list(OTHER_TIERS)
    print(*(tier.target for tier in tiers))


if __name__ == "__main__":
    main()

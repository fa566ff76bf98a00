# SPDX-License-Identifier: Apache-2.0
"""try_patches.py [NAME...]: runs each proposal's case on a scratch tree without its patch, then with it; prints a table.

The case must fail by the fault first, and pass then. Ends with 1 if one does not. What cannot run here is named.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proposals import CASES, PROPOSALS, Original, Proposal, Tree, find_original
from scratch_trees import apply_patch, make_tree, touched_files

TIMEOUT_S = 900
OUTCOME = re.compile(r"^OUTCOME (.*)$|^=* ?(\d+ (?:failed|passed).*?)(?: in [\d.]+s.*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """Result of one run of a case."""

    returncode: int
    said: str
    tail: str

    @property
    def shows_the_fault(self) -> bool:
        """A case says 3 and pytest says 1; anything else is a crash, which shows nothing."""
        return self.returncode in (1, 3) and bool(self.said)


def run(proposal: Proposal, original: Original, scratch: Path, *, is_patched: bool) -> Outcome:
    """Runs the case of a proposal on a tree of its own. NeMo-RL's tests come with the patch, so they are always there."""
    make_tree(original.root, touched_files(proposal.patch), scratch)
    is_nemo_rl = proposal.tree is Tree.NEMO_RL
    if is_patched or is_nemo_rl:
        apply_patch(proposal.patch, scratch, None if is_patched else "tests/*")
    pytest = ["-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider", proposal.case]
    done = subprocess.run(
        [original.python, *(pytest if is_nemo_rl else [str(CASES / proposal.case)])],
        cwd=scratch,
        env=_environment(original, scratch),
        text=True,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    output = done.stdout + done.stderr
    found = OUTCOME.findall(output)
    return Outcome(done.returncode, "".join(found[-1]) if found else "", output[-4000:])


def _environment(original: Original, scratch: Path) -> dict[str, str]:
    # No bytecode: it would be written beside the originals, which scratch trees link to.
    own = {"PYTHONPATH": os.pathsep.join(map(str, (scratch, *original.paths))), "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **original.settings, **own}


def try_proposal(proposal: Proposal) -> tuple[str, str, str]:
    """Returns a verdict on a proposal, and the observations without the patch and with it."""
    original = find_original(proposal.tree)
    if isinstance(original, str):
        return "skipped", original, ""
    with tempfile.TemporaryDirectory() as folder:
        before = run(proposal, original, Path(folder) / "before", is_patched=False)
        after = run(proposal, original, Path(folder) / "after", is_patched=True)
    if before.shows_the_fault and after.returncode == 0:
        return "red, then green", before.said, after.said
    for name, outcome in (("without", before), ("with", after)):
        print(f"{proposal.name}, {name} the patch: ended with {outcome.returncode}\n{outcome.tail}", file=sys.stderr)
    return "NOT SHOWN", before.said, after.said


def main(names: Sequence[str]) -> int:
    """Returns the status of the process."""
    unknown = set(names) - {proposal.name for proposal in PROPOSALS}
    if unknown:
        print(f"no such proposal: {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in PROPOSALS)}")
        return 2
    rows = []
    for proposal in PROPOSALS:
        if not names or proposal.name in names:
            rows.append((proposal.name, proposal.tree.value, *try_proposal(proposal)))
            print(" | ".join(rows[-1]), flush=True)
    print("\n| proposal | against | result | without the patch | with it |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return int(any(row[2] == "NOT SHOWN" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

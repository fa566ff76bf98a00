# SPDX-License-Identifier: Apache-2.0
"""Plans the calls of one lease of a GPU machine. The plan says which parts each call carries, and which command it runs.

A lease is the time for which the machine is lent. A part is a file or folder that travels with a call besides the working
tree. Needs no git.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
MOST_BYTES = 64 * MIB
"""Most bytes that a call may carry, in its working tree and its parts together."""
MARGIN = MIB // 2
"""Bytes reserved for what a transfer adds to the files."""
MOST_PATHS = 8
"""Most parts that a call may carry."""
MOST_TEXT = 2_000
"""Most characters that a call's command may have."""
LEASE_S = 900
"""Seconds of a lease, which include the start of the machine."""
PLACE = Path(".gpu_parts")
CARGO, PIECE = "model", "piece"
"""Names of a folder to carry and of the model's piece in it. A number follows each name."""
UNPACK = PLACE / "unpack.sh"
SITES = ". .gpu_parts/unpack.sh engines || exit 1; export VLLM_USE_FLASHINFER_SAMPLER=0"
"""Shell commands that make vLLM importable on the machine. Their script is made together with vLLM's parts, outside of this
repository."""
FIRST_ITEMS, MODEL_ITEMS = "overhead syncs", "real_8b real"


@dataclass(frozen=True)
class Part:
    """A file or folder that a call can carry."""

    path: str
    num_bytes: int
    is_model: bool
    """Whether the part is a piece of the model. The other parts are vLLM's files and the scripts that unpack them."""

    @property
    def is_script(self) -> bool:
        """Returns whether the part is a script. A part below 1 MiB counts as a script, unless it is a piece of the model.

        Every call that starts an engine carries the scripts, while the other parts travel once.
        """
        return not self.is_model and self.num_bytes < MIB


@dataclass(frozen=True)
class Call:
    """A call with the parts that it carries, its time limit, and the command that it runs."""

    about: str
    parts: tuple[Part, ...]
    timeout_s: int
    command: str

    def num_bytes(self, tree: int) -> int:
        """Returns how many bytes the call carries if the working tree has `tree` bytes."""
        return tree + sum(part.num_bytes for part in self.parts) + MARGIN

    def problem(self, tree: int) -> str:
        """Returns why the call would be refused if the working tree has `tree` bytes, or an empty string if it would not."""
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
    """Returns pieces of the model in groups that fit a call each. The pieces stay in their order."""
    groups: list[list[Part]] = []
    for piece in pieces:
        if groups and Call("", (*groups[-1], piece), 0, "").problem(tree) == "":
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def described(tree: int, parts: Sequence[Part]) -> str:
    """Returns the plan as text for the terminal. `tree` is the bytes of the working tree.

    The text lists the parts. Then it lists the calls, each with its size, whether it fits, and its command.
    """
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

# SPDX-License-Identifier: Apache-2.0
"""Compiles recorded launches with Triton's own assembler, which needs no GPU, and reads the machine code."""

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton.backends
from device import Launch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import MockTensor, create_function_from_signature

triton.backends.backends.pop("cpu", None)  # the backend that vLLM was shown cannot compile
TARGETS = {name: GPUTarget("cuda", number, 32) for name, number in (("sm_90", 90), ("sm_100", 100))}
"""Hopper and Blackwell."""
INSTRUCTION = re.compile(r"^[^\t]*\t(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True)
class MachineCode:
    """Machine code of a kernel, in numbers."""

    instructions: Counter[str]
    """Number of instructions by name, without modifiers and padding."""
    registers: int
    """Registers of a thread."""
    local_bytes: int
    """Memory of a thread, for values that do not fit in its registers."""


class _Pointer(MockTensor):
    """A tensor as Triton specializes a kernel for it. A device's memory is allocated in aligned blocks."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.dtype)
        self._bytes = tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self._bytes


def _without_contents(value: Any) -> Any:
    if isinstance(value, tuple):
        parts = map(_without_contents, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return _Pointer(value) if isinstance(value, Tensor) else value


def specialized(launch: Launch, target: str = "sm_90") -> tuple[ASTSource, dict[str, Any]]:
    """Returns the source for which Triton compiles a launch, and the options.

    Launches share a compiled variant if and only if both are equal.
    """
    kernel, backend = launch.kernel, make_backend(TARGETS[target])
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = {name: _without_contents(value) for name, value in launch.options.items()}
    bound = bind(*map(_without_contents, launch.args), **options)
    options, signature, constants, attributes = kernel._pack_args(backend, options, *bound)
    return ASTSource(kernel, signature, constants, attributes), vars(options)


def machine_code(launch: Launch, target: str = "sm_90") -> MachineCode:
    """Returns the machine code of a launch's kernel."""
    source, options = specialized(launch, target)
    asm = triton.compile(source, target=TARGETS[target], options=options).asm
    names = (name.split(".")[0] for name in INSTRUCTION.findall(asm["sass"]))
    with TemporaryDirectory() as folder:
        file = Path(folder, "cubin")
        file.write_bytes(asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = map(int, RESOURCES.search(said).groups())
    return MachineCode(Counter(name for name in names if name != "NOP"), registers, stack + local)

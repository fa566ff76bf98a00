# SPDX-License-Identifier: Apache-2.0
"""Compiles recorded launches for an H100 with Triton's own assembler, which needs no GPU, and counts instructions."""

import re
from collections import Counter

import torch
import triton.backends
from device import Launch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

triton.backends.backends.pop("cpu", None)  # the backend that vLLM was shown cannot compile
H100 = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
ALIGNED = [["tt.divisibility", 16]]
INSTRUCTION = re.compile(r"^[^\t]*\t(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


def source_of(launch: Launch) -> tuple[ASTSource, dict[str, int]]:
    """Returns the source of a launch, specialized for aligned and round arguments as by Triton, and its options."""
    kernel, options = launch.kernel, dict(launch.options)
    values = dict(zip(kernel.arg_names, launch.args, strict=False))
    values |= {name: options.pop(name) for name in list(options) if name in kernel.arg_names}
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[i,] = ALIGNED
        elif isinstance(value, tuple):
            signature[parameter.name] = type(value)(*(TYPES[tensor.dtype] for tensor in value))
            attributes |= dict.fromkeys(((i, j) for j in range(len(value))), ALIGNED)
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if not parameter.do_not_specialize and value % 16 == 0:
                attributes[i,] = ALIGNED
    return ASTSource(kernel, signature, constants, attributes), options


def instructions(launch: Launch) -> Counter[str]:
    """Counts the machine instructions of the kernel on an H100 by name, without modifiers and padding."""
    source, options = source_of(launch)
    machine_code = triton.compile(source, target=H100, options=options).asm["sass"]
    names = (name.split(".")[0] for name in INSTRUCTION.findall(machine_code))
    return Counter(name for name in names if name != "NOP")

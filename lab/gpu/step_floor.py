# SPDX-License-Identifier: Apache-2.0
"""A decode step on one GPU, on paper: bytes and operations of each part, their floor, and a likely time.

    python -m lab.gpu.step_floor

prints the tables; docs/benchmarks/gpu-step.md compares them with a run. The floor of a part is the longest of three: its bytes
at the data sheet's bandwidth, its products at the dense peak, its other instructions at the peak of ordinary cores. The likely
time follows from `Assumptions`, which nothing here measures. Weights, logits and KV cache are bfloat16. Passes, launches and
dependent loads were counted in vLLM 0.32 and in this package, and instructions in their machine code for a Hopper GPU.
`tests/lab/test_gpu_on_paper.py` holds the sizes of blocks to the sources.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lab.gpu.gpu_report import Table, as_text
from lab.simulation.data_sheets import DEVICES, MODELS, Device, ModelShape, eagle3_head

NAMES = ("Qwen3-8B", "Qwen3-30B-A3B")
BATCHES = (1, 8, 32, 128, 256)
DRAFTS = (0, 1, 3, 7)
BF16 = 2
"""Bytes of a number."""
KERNELS_OF_ATTENTION = 8
"""Kernels of a layer: norm, qkv, norms of q and k, rotation, cache, attention, output."""
KERNELS_OF_MLP, KERNELS_OF_EXPERTS = 4, 9
"""Norm, two products, activation; with experts also the router, its choice, sorting, and the sum."""
LARGEST_GRAPH = 512
"""Rows of vLLM's largest CUDA graph by default. The host launches each kernel of a larger step."""

INSTRUCTIONS_PER_S = 33.5e12
"""Instructions of ordinary cores a second, counted for each lane: half of the data sheets' 67 TFLOP/s in float32."""
GRADE_BLOCK, RANK_BLOCK = 1024, 8192
"""Logits that a program of vLLM's log-prob kernel and of its rank kernel reads at a time."""
NOISE_INSTRUCTIONS = 107
"""Instructions that score a logit: two rounds of hashing and two logarithms."""
NUM_POSITIONS = 7
"""Draft positions of the engine."""
INDEX_ORDERS = (4, 3)
"""Context lengths that the indexes of `suffix` and `ngram` count by default."""
LEARNING_PARTS, KEYS_AT_A_TIME, SUMS_AT_A_TIME = 512, 256, 32
"""Programs of `_learn` for an index, keys that each reads at a time, and rows of sums that `_observe` adds at a time."""


@dataclass(frozen=True)
class Assumptions:
    """Figures that no data sheet has. Sources are on the page."""

    memory_share: float = 0.8
    """Achieved share of the bandwidth."""
    compute_share: float = 0.65
    """Achieved share of both peaks of operations."""
    round_trip_s: float = 5e-7
    """Seconds from a load to the next load that needs its result."""
    kernel_s: float = 2e-6
    """Seconds in which a kernel starts and ends, and the memory is idle."""
    host_s: float = 1.5e-3
    """Seconds of vLLM's host work in a step."""
    host_request_s: float = 8e-6
    """The same for each request."""
    launch_s: float = 9e-6
    """Seconds of the host to launch a kernel outside of CUDA graphs, from Python."""


TYPICAL = Assumptions()


@dataclass(frozen=True)
class Part:
    """Work of a GPU that begins when the part before it has ended."""

    name: str
    num_bytes: float
    """Bytes between memory and chip."""
    flops: float = 0.0
    """Operations of matrix products."""
    kernels: int = 0
    round_trips: int = 0
    """Loads in a row of which each needs the result of the one before, in the longest program."""
    instructions: float = 0.0
    """Other instructions of all lanes, where they matter."""

    def floor_s(self, device: Device) -> float:
        """Returns the seconds at the data sheet's figures."""
        instructions_s = self.instructions / INSTRUCTIONS_PER_S
        return max(self.num_bytes / device.hbm_bytes_per_s, self.flops / device.bf16_flops, instructions_s)

    def likely_s(self, device: Device, assumed: Assumptions = TYPICAL) -> float:
        """Returns the seconds under assumptions."""
        return assumed.kernel_s * self.kernels + max(
            self.num_bytes / (device.hbm_bytes_per_s * assumed.memory_share),
            self.flops / (device.bf16_flops * assumed.compute_share),
            self.instructions / (INSTRUCTIONS_PER_S * assumed.compute_share),
            assumed.round_trip_s * self.round_trips,
        )


@dataclass(frozen=True)
class Sampler:
    """A way to sample rows and to grade the sampled tokens, from logits in bfloat16."""

    name: str
    logit_bytes: int
    """Bytes that are read and written for each logit of a row."""
    logit_instructions: int
    """Instructions for each logit."""
    kernels: int
    round_trips: int


def samplers(vocab_size: int) -> tuple[Sampler, Sampler, Sampler, Sampler]:
    """Returns vLLM's functions at temperature 1 and at another temperature, then this package's kernels at both.

    vLLM reads a row to sample, twice for the log-prob, and once for the rank. One program serves a row for the latter two, and
    each of its blocks waits for the block before. At another temperature, a copy in float32 is made, divided and read.
    """
    in_a_row = 2 * math.ceil(vocab_size / GRADE_BLOCK) + math.ceil(vocab_size / RANK_BLOCK)
    reads, copy = 4, BF16 + 4 + 4 + 4
    return (
        Sampler("vLLM, T = 1", reads * BF16, NOISE_INSTRUCTIONS + 24, 5, in_a_row + 9),
        Sampler("vLLM, other T", copy + reads * 4, NOISE_INSTRUCTIONS + 32, 7, in_a_row + 12),
        Sampler("ours, T = 1", 2 * BF16, NOISE_INSTRUCTIONS + 31, 2, 15),
        Sampler("ours, other T", 2 * BF16, NOISE_INSTRUCTIONS + 41, 2, 15),
    )


@dataclass(frozen=True)
class Step:
    """A decode step. All its rows but one of each request verify drafts."""

    shape: ModelShape
    num_requests: int
    num_rows: float
    context: float
    """Mean tokens of a text."""

    @property
    def has_drafts(self) -> bool:
        return self.num_rows > self.num_requests


def network(step: Step) -> list[Part]:
    """Returns the parts of the forward pass: dense weights, experts, attention over the KV cache, LM head."""
    shape, rows, layers = step.shape, step.num_rows, step.shape.num_hidden_layers
    output = shape.hidden_size * shape.vocab_size
    dense, active_experts = shape.shared_params - output, shape.active_params - shape.shared_params
    experts = float(shape.params_read(rows)) - shape.shared_params
    attended = float(shape.attention_flops(rows, step.context))
    cache = step.num_requests * step.context * shape.kv_values_per_token
    mlp = KERNELS_OF_EXPERTS if shape.num_experts else KERNELS_OF_MLP
    parts = [Part("weights", BF16 * dense, 2.0 * dense * rows, (KERNELS_OF_ATTENTION - 1 + mlp) * layers)]
    if shape.num_experts:
        parts.append(Part("experts", BF16 * experts, 2.0 * active_experts * rows))
    parts.append(Part("KV cache", BF16 * cache, attended, layers))
    return [*parts, Part("LM head", BF16 * (output + shape.vocab_size * rows), 2.0 * output * rows, 1)]


def sampling(step: Step, sampler: Sampler | None = None) -> Part:
    """Returns the sampling and grading of all rows, by this package's kernels or by another sampler."""
    sampler = sampler or samplers(step.shape.vocab_size)[2]
    logits, instructions = float(step.shape.vocab_size) * step.num_rows, sampler.logit_instructions
    return Part(
        "sampling", sampler.logit_bytes * logits, 0.0, sampler.kernels, sampler.round_trips, instructions * logits
    )


def drafting(step: Step) -> list[Part]:
    """Returns what the board with both text drafters does after a step: a part for each of its launches.

    Each request's text has grown by as many tokens as it has rows, the most that a step can bring. Proposals have full length.
    """
    requests, drafters, positions = step.num_requests, len(INDEX_ORDERS), NUM_POSITIONS
    new, orders = math.ceil(step.num_rows / requests), sum(INDEX_ORDERS)
    keys = requests * new * INDEX_ORDERS[0]
    mean = keys / LEARNING_PARTS
    fullest = math.ceil(mean + 3.0 * math.sqrt(mean))  # keys of the program with most, if they spread at random
    observed = drafters * (positions * 17 + 40) + new * (orders * 8 + 40)
    learned = new * orders * (2 * (64 + 32) + 8)
    proposed = positions * (64 * orders + 32 * drafters) + drafters * positions * 24
    return [
        Part("observe", requests * observed, 0.0, 1, 16 + math.ceil(requests / SUMS_AT_A_TIME)),
        Part("learn", requests * learned, 0.0, 1, 1 + math.ceil(keys / KEYS_AT_A_TIME) + 2 * fullest),
        Part("propose", requests * proposed, 0.0, 1, drafters * (3 + 2 * positions) + 5),
        Part("copy of rates", requests * positions * 4, 0.0, 1),
    ]


def head_pass(step: Step) -> Part:
    """Returns one pass of an EAGLE-3 head of the policy's width: one draft token for each request, sampled.

    Its layer reads the embedding and the features side by side. The three features are joined once, before the first pass.
    """
    shape, rows = eagle3_head(step.shape), step.num_requests
    joined = shape.hidden_size * shape.head_dim * (shape.num_attention_heads + 2 * shape.num_key_value_heads)
    params = shape.shared_params + joined
    cache = step.num_requests * step.context * shape.kv_values_per_token
    logits = shape.vocab_size * rows
    num_bytes = BF16 * (params + cache + 2 * logits)  # logits are written, and read to be sampled
    kernels = KERNELS_OF_ATTENTION + KERNELS_OF_MLP + 3 + 2
    return Part("head", num_bytes, 2.0 * params * rows, kernels, 0, NOISE_INSTRUCTIONS * logits)


def parts_of(step: Step) -> list[Part]:
    """Returns all work of a step on the GPU, with text drafters if the step has drafts."""
    return [*network(step), sampling(step), *(drafting(step) if step.has_drafts else [])]


def host_s(step: Step, assumed: Assumptions = TYPICAL) -> float:
    """Returns the host's likely seconds. vLLM schedules asynchronously, so the GPU works meanwhile."""
    outside = network(step) if step.num_rows > LARGEST_GRAPH else []
    launches = sum(part.kernels for part in [*outside, sampling(step), *drafting(step)])
    return assumed.host_s + assumed.host_request_s * step.num_requests + assumed.launch_s * launches


def floor_s(parts: Sequence[Part], device: Device) -> float:
    """Returns the sum of the parts' floors."""
    return sum(part.floor_s(device) for part in parts)


def likely_s(step: Step, device: Device) -> float:
    """Returns the likely seconds of a step: of the GPU, or of the host if that takes longer."""
    return max(sum(part.likely_s(device) for part in parts_of(step)), host_s(step))


def fits(step: Step, device: Device) -> bool:
    """Returns whether the texts fit beside the weights in 90 % of the memory."""
    weights, token = BF16 * step.shape.params, BF16 * step.shape.kv_values_per_token
    return weights + step.num_requests * step.context * token <= 0.9 * device.hbm_bytes


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f}"


def step_table(name: str, context: int, drafts: Sequence[int]) -> Table:
    """Returns the floor of each part on an H100, and the whole step on an H100 and an H200, in milliseconds."""
    h100, h200, rows = DEVICES["H100"], DEVICES["H200"], []
    of_network = [part.name for part in network(Step(MODELS[name], 1, 1, context))]
    for batch in BATCHES:
        for k in drafts:
            step = Step(MODELS[name], batch, batch * (1 + k), context)
            parts = {part.name: part for part in parts_of(step)}
            ours = sum(part.likely_s(h100) for part in drafting(step)) if k else 0.0
            likely = [_ms(likely_s(step, device)) if fits(step, device) else "-" for device in (h100, h200)]
            rows.append(
                [str(batch), str(k), *(_ms(parts[part].floor_s(h100)) for part in [*of_network, "sampling"]),
                 _ms(floor_s([*parts.values()], h100)), *likely, _ms(host_s(step)),
                 f"{100 * ours / likely_s(step, h100):.1f} %" if k else "-"]
            )  # fmt: skip
    columns = ["requests", "drafts", *of_network, "sampling", "floor", "likely", "likely, H200", "host", "our drafting"]
    return Table(f"{name}, texts of {context:,} tokens", columns, rows)


def sampling_table() -> Table:
    """Returns what each sampler takes for a vocabulary of Qwen3, in microseconds on an H100: floor, and likely time."""
    h100, shape, rows = DEVICES["H100"], MODELS[NAMES[0]], []
    ways = samplers(shape.vocab_size)
    for num_rows in (1, 8, 32, 128, 256, 1024):
        parts = [sampling(Step(shape, num_rows, num_rows, 0), way) for way in ways]
        cells = [f"{_us(part.floor_s(h100))}, {_us(part.likely_s(h100))}" for part in parts]
        rows.append([str(num_rows), *cells])
    counts = [
        f"{way.logit_bytes} B and {way.logit_instructions} instructions a logit, {way.kernels} launches, "
        f"{way.round_trips} loads in a row"
        for way in ways
    ]  # fmt: skip
    return Table("sampling, us: floor, likely", ["rows", *(way.name for way in ways)], [["", *counts], *rows])


def drafting_table() -> Table:
    """Returns likely microseconds of each launch of the board on an H100, after steps with three drafts a request."""
    h100, rows = DEVICES["H100"], []
    for batch in BATCHES:
        parts = drafting(Step(MODELS[NAMES[0]], batch, 4 * batch, 0))
        cells = [f"{_us(part.likely_s(h100))} ({part.round_trips})" for part in parts]
        total = sum(part.likely_s(h100) for part in parts)
        rows.append(
            [str(batch), *cells, _us(total), _us(floor_s(parts, h100)) if floor_s(parts, h100) > 5e-7 else "<1"]
        )
    names = [part.name for part in drafting(Step(MODELS[NAMES[0]], 1, 1, 0))]
    return Table("drafting, us (loads in a row)", ["requests", *names, "likely", "floor"], rows)


def head_table() -> Table:
    """Returns a pass of an EAGLE-3 head on an H100, in milliseconds, and its likely share of a plain step of the policy."""
    h100, rows = DEVICES["H100"], []
    for batch in BATCHES:
        cells = []
        for name in NAMES:
            step = Step(MODELS[name], batch, batch, 512)
            one = head_pass(step)
            share = one.likely_s(h100) / likely_s(step, h100)
            cells += [_ms(one.floor_s(h100)), _ms(one.likely_s(h100)), f"{100 * share:.0f} %"]
        rows.append([str(batch), *cells])
    columns = [f"{name}: {what}" for name in NAMES for what in ("floor", "likely", "share")]
    return Table("a pass of the head, ms", ["requests", *columns], rows)


def main() -> None:
    """Prints all tables."""
    steps = [step_table(name, context, DRAFTS) for name in NAMES for context in (2048, 8192)]
    print("\n\n".join(map(as_text, [*steps, sampling_table(), drafting_table(), head_table()])))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Makes the rows of a bench. A row is a way of rolling out, with the generation config of its engine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.local.run_config import RunConfig
from lab.local.run_sections import GenerationConfig
from nemo_specrollout.config.block import SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import ModelDrafterConfig, TextDrafterConfig
from nemo_specrollout.config.strict import ConfigError
from nemo_specrollout.generation.engine.arguments import TEXT_METHOD, native_config

PLAIN, STOCK, OURS = "plain", "stock", "ours"
FIXED = "fixed"
"""The kind of a row that always drafts with one method and the same number of drafts. The other kinds are called like their
rows."""
# The rows that show what each kind of drafter is worth without the others.
TEXT_ALONE, HEAD_ALONE, MODEL_ALONE = "ours, text drafters", "ours, head alone", "ours, draft model alone"
# Plain decoding once more, in the engine that starts last. How far its speed is from that of `plain` shows how far the other
# rows' figures can be trusted.
CONTROL = "control"
# Matches have 2 to 5 tokens, as in the n-gram rows of the papers. vLLM's default needs 5 and finds almost nothing here.
_LOOKUP = {"method": TEXT_METHOD, "prompt_lookup_min": 2, "prompt_lookup_max": 5}


@dataclass(frozen=True)
class BenchRow:
    """A row of the bench, which is a way to generate.

    `kind` is `plain` for our worker without drafts, `stock` for vLLM without our package, `fixed` for one draft method and
    always the same number of drafts, or `ours` for our drafters.
    """

    name: str
    kind: str
    generation: GenerationConfig

    @property
    def is_vllms_own(self) -> bool:
        """Returns whether vLLM speculates by itself, without our worker."""
        return self.kind == FIXED and not self.generation.specrollout.enabled

    @property
    def has_plain_tokens(self) -> bool:
        """Returns whether the row must make the same tokens as plain decoding.

        This is false only for vLLM's own speculation at a temperature above 0, because its rejection sampler draws other
        tokens.
        """
        return not self.is_vllms_own or self.generation.temperature == 0


def bench_rows(config: RunConfig) -> list[BenchRow]:
    """Returns the rows that the config requests in `bench.rows`, or all rows but `control` if this is empty.

    An entry of `bench.rows` requests each row whose name begins with it. Raises ConfigError for an entry that requests no row.
    """
    rows = list(_all_rows(config))
    wanted = config.bench.rows
    for prefix in wanted:
        if not any(row.name.startswith(prefix) for row in rows):
            names = ", ".join(row.name for row in rows)
            raise ConfigError(f"bench.rows: no row begins with {prefix!r}; there are: {names}")
    return [r for r in rows if r.name == PLAIN or (r.name.startswith(wanted) if wanted else r.name != CONTROL)]


def row_groups(rows: Sequence[BenchRow], at_a_time: int) -> list[list[BenchRow]]:
    """Returns the rows in groups of at most `at_a_time` rows. Each group begins with plain decoding.

    If `at_a_time` is 0, there is one group.
    """
    plain = next(row for row in rows if row.name == PLAIN)
    others = [row for row in rows if row is not plain]
    if not at_a_time or len(rows) <= at_a_time:
        return [list(rows)]
    return [[plain, *others[i : i + at_a_time - 1]] for i in range(0, len(others), at_a_time - 1)]


def plain_row(config: RunConfig) -> BenchRow:
    """Returns the row of our worker without drafters. All other rows are compared with it."""
    ours = config.policy.generation
    block = replace(ours.specrollout, enabled=True, drafters=(), draft_refresh=None, fastest_of_n=None)
    return BenchRow(PLAIN, PLAIN, replace(ours, vllm_kwargs=_without_speculation(ours), specrollout=block))


def _all_rows(config: RunConfig) -> Iterator[BenchRow]:
    ours = config.policy.generation
    block = replace(ours.specrollout, enabled=True, draft_refresh=None)  # no head learns in a bench
    off = SpecrolloutConfig(enabled=False)
    stock = BenchRow(STOCK, STOCK, replace(ours, vllm_kwargs=_without_speculation(ours), specrollout=off))
    plain = plain_row(config)
    drafter = block.model_drafter
    yield from (stock, plain)
    for k in config.bench.fixed_k:
        lookup = {**_LOOKUP, "num_speculative_tokens": k}
        yield _fixed(f"ngram k={k}", plain, lookup)
        yield _fixed(f"vLLM's ngram k={k}", stock, lookup)
    if drafter is not None:
        for k in config.bench.fixed_k:
            native = native_config(drafter, k)
            yield _fixed(f"{drafter.type} greedy k={k}", plain, native)
            yield _fixed(f"vLLM's {drafter.type} greedy k={k}", stock, native)
            sampled = {**native, "draft_sample_method": "probabilistic"}
            yield _fixed(f"vLLM's {drafter.type} probabilistic k={k}", stock, sampled)
        yield from _ours_apart(ours, block, drafter)
    yield BenchRow(OURS, OURS, replace(ours, specrollout=block))
    yield replace(plain, name=CONTROL)


def _ours_apart(ours: GenerationConfig, block: SpecrolloutConfig, drafter: ModelDrafterConfig) -> Iterator[BenchRow]:
    """Yields a row of our text drafters alone and a row of our drafter with weights alone, if the config has both kinds."""
    text = tuple(d for d in block.drafters if isinstance(d, TextDrafterConfig))
    if not text:
        return
    of_text = replace(block, drafters=text, fastest_of_n=None)
    yield BenchRow(TEXT_ALONE, OURS, replace(ours, specrollout=of_text))
    name = MODEL_ALONE if drafter.type == "draft_model" else HEAD_ALONE
    alone = replace(block, drafters=(drafter,), fastest_of_n=None)
    yield BenchRow(name, OURS, replace(ours, specrollout=alone))


def _fixed(name: str, base: BenchRow, speculative: dict[str, Any]) -> BenchRow:
    """Returns a row like `base` in which vLLM's own speculation is on, with the options `speculative`."""
    kwargs = {**base.generation.vllm_kwargs, "speculative_config": speculative}
    return BenchRow(name, FIXED, replace(base.generation, vllm_kwargs=kwargs))


def _without_speculation(generation: GenerationConfig) -> dict[str, Any]:
    return {k: v for k, v in generation.vllm_kwargs.items() if k != "speculative_config"}

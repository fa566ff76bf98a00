# SPDX-License-Identifier: Apache-2.0
"""Decides which CUDA graphs an engine captures. vLLM is not imported.

By default vLLM captures graphs of up to 512 rows, because an engine step of plain decoding has one row for each request. An
engine step that verifies drafts has many more, for example 1,056 rows for 32 requests with 32 drafts each. If a step has more
rows than the largest graph, the host launches each kernel of each layer, and the GPU waits for the host. So larger graphs are
captured if the drafts that a block allows can fill them.
"""

from collections.abc import Mapping
from typing import Any

from nemo_specrollout.storage.model_folder import text_config

LARGEST = 2048
"""Number of rows of the largest graph. At 2,048 rows, a GPU needs about as long to compute a layer as the host to launch it.
So still larger graphs would save nothing."""
LOGITS_BYTES = 1 << 30
"""Largest number of bytes of the float32 logits that vLLM samples at once (`MAX_CHUNK_BYTES`). The logits of all rows of a
graph must fit into them."""
_SPLITS = 32
"""vLLM's default of `attention_config.flash_attn_max_num_splits_for_cuda_graph`."""
_STRIDES = {1024: 128, LARGEST: 256}
"""Difference in rows between successive graphs beyond vLLM's largest one. Each key is the number of rows up to which the value
applies."""
_ALIGNED = 16
"""The number of rows of every graph is a multiple of this, so that tensor-parallel ranks can divide them evenly."""
_USERS_SIZES = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
"""Settings by which a user chooses the sizes of graphs. They may be in `compilation_config` or among vLLM's arguments."""


def larger_graphs(
    arguments: Mapping[str, Any], most_rows: int, largest_of_vllm: int, vocab_size: int | None = None
) -> list[int]:
    """Returns the row counts of graphs to capture in addition to vLLM's, ascending.

    The list is empty if vLLM's graphs suffice, or if the user has chosen sizes.

    Args:
        arguments: vLLM's arguments.
        most_rows: number of rows of the largest engine step, in which every request verifies all drafts for which there is
        room.
        largest_of_vllm: number of rows of the largest graph that vLLM captures by default on this device.
        vocab_size: number of tokens of the policy's vocabulary, or None if unknown.
    """
    compilation = arguments.get("compilation_config")
    if compilation is not None and not isinstance(compilation, Mapping):
        return []
    if any(place.get(name) is not None for place in (arguments, compilation or {}) for name in _USERS_SIZES):
        return []
    if arguments.get("performance_mode") not in (None, "balanced"):  # vLLM's own sizes then differ from `vllms_graphs`
        return []
    most_rows = min(most_rows, LARGEST, LOGITS_BYTES // (4 * vocab_size) if vocab_size else LARGEST)
    most_rows -= most_rows % _ALIGNED
    sizes = []
    size = largest_of_vllm
    while size < most_rows:
        stride = next(stride for bound, stride in _STRIDES.items() if size < bound)
        size = min(size + stride, most_rows)
        sizes.append(size)
    return sizes


def vllms_graphs(largest: int) -> list[int]:
    """Returns the row counts of the graphs that vLLM captures by default (`VllmConfig._set_cudagraph_sizes`)."""
    return [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]


def graph_bytes(policy: Mapping[str, Any], num_rows: int, num_ranks: int = 1) -> int | None:
    """Estimates how many bytes an engine's CUDA graphs take on each of `num_ranks` tensor-parallel ranks.

    `policy` is the content of the policy's config.json, and `num_rows` is the number of rows of the largest graph. Returns
    None if the config lacks a size that is needed.

    The estimate is for a dense model in bfloat16. All graphs share one pool of memory, which must hold what the largest graph
    computes for a layer. This includes hidden states, queries, keys, values and both halves of the FFN. FlashAttention 3 needs
    most of the memory, because within graphs it keeps partial outputs in float32 for up to 32 splits of each text. When an
    engine starts, vLLM measures the memory of its graphs, and makes the KV cache smaller by this amount.
    """
    policy = text_config(policy)
    try:
        hidden, ffn = int(policy["hidden_size"]), int(policy["intermediate_size"])
        heads = int(policy["num_attention_heads"])
        key_heads = int(policy.get("num_key_value_heads") or heads)
        head_size = int(policy.get("head_dim") or hidden // heads)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    shared = (heads + 2 * key_heads) * head_size + 3 * ffn
    splits = _SPLITS * heads * head_size
    return num_rows * (2 * 4 * hidden + (2 * shared + 4 * splits) // num_ranks)

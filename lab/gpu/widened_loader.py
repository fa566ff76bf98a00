# SPDX-License-Identifier: Apache-2.0
"""A loader for vLLM that makes the weights of a widened policy while it loads them, so that no file of 15 GB is needed."""

import json
from pathlib import Path
from typing import Any

from torch import nn

from lab.policies.widened import Shape, read_policy, widened, write_description

LOAD_FORMAT = "widened"
MARKER = "widened.json"
"""Name of the file which says that a folder's weights are made from those of another folder."""


def widened_folder(source: Path, target: Shape, out: Path) -> Path:
    """Writes the folder `out`, from which vLLM loads the widened policy with `load_format=LOAD_FORMAT`.

    Returns this folder.
    """
    write_description(source, target, out, MARKER)
    return out


def register() -> None:
    """Registers the load format `LOAD_FORMAT` with the vLLM of this process."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class WidenedLoader(BaseModelLoader):
        """Makes the weights of a model whose folder has a marker file. Loads other models, such as a head, as vLLM does."""

        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            folder = Path(model_config.model)
            if not (folder / MARKER).is_file():
                default = self.load_config.__class__(load_format="auto", use_tqdm_on_load=False)
                DefaultModelLoader(default).load_weights(model, model_config)
                return
            device = next(model.parameters()).device
            made = json.loads((folder / MARKER).read_text(encoding="utf-8"))
            tensors = widened(*read_policy(Path(made["source"])), Shape(**made["target"]), device)
            load_into: Any = model.load_weights
            load_into((name, tensor.to(model_config.dtype)) for name, tensor in tensors)

    register_model_loader(LOAD_FORMAT)(WidenedLoader)

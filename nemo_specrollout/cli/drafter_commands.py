# SPDX-License-Identifier: Apache-2.0
"""The commands `serve-drafter`, which runs a remote drafter, and `publish-draft`, which gives new weights to drafters.

A remote drafter is a draft model in an engine of its own, which drafts for other engines.
"""

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_specrollout.cli.command_line import use_threads
from nemo_specrollout.config.addresses import check_addresses, check_listening_address
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import RemoteDrafterConfig, shared_secret
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.nemo_rl_tree import VLLM_CFG, at
from nemo_specrollout.config.strict import ConfigError, build

if TYPE_CHECKING:
    from nemo_specrollout.remote.drafter.drafter_spec import DrafterReport

_LONGEST_PATH = 4095
"""Maximum length of a path that Linux can open, in bytes."""


def serve_drafter(parsed: argparse.Namespace) -> int:
    """Runs a remote drafter until the user interrupts it, and shows its status meanwhile.

    Raises ConfigError if the drafter cannot start. It finds most mistakes before it loads the model.
    """
    check_listening_address("--address", parsed.address)
    shared_secret([parsed.address])
    tree = load_config(parsed.config, parsed.overrides)
    drafter = _remote_drafter(tree)
    on_cpu = not Path("/dev/nvidia0").exists()
    if on_cpu:
        use_threads()
    from rich.console import Console

    from nemo_specrollout.remote.drafter.drafter_service import DrafterService
    from nemo_specrollout.remote.drafter.drafter_spec import drafter_spec

    spec = drafter_spec(drafter, at(tree, VLLM_CFG) or {}, parsed.address, on_cpu=on_cpu)
    console = Console(highlight=False)
    with console.status(f"loading {drafter.model}"):
        service = DrafterService(spec)
    console.print(f"drafting with {drafter.model} at {service.status.address}; Ctrl-C ends it")
    try:
        with console.status("no requests yet") as line:
            service.run(lambda status: line.update(_in_words(status)))
    finally:
        service.close()
    return 0


def publish_draft(parsed: argparse.Namespace) -> int:
    """Gives remote drafters new weights, and returns 0.

    If the config has `weights_from`, a folder that the drafters watch, the weights are copied to this folder. Otherwise, or
    with `--address`, the path of the weights is sent to the drafters. Raises ConfigError if a drafter refuses the weights or
    does not answer, or if drafters that watch the folder would refuse them. A drafter that refuses new weights continues with
    its old ones.
    """
    drafter = _remote_drafter(load_config(parsed.config, parsed.overrides))
    if not 0 <= (parsed.version or 0) < 2**63:
        raise ConfigError(f"--version: {parsed.version} is out of range; it must be at least 0 and below 2^63")
    if drafter.weights_from is not None and not parsed.address:
        return _publish_to_folder(drafter, drafter.weights_from, Path(parsed.weights), parsed.version)
    addresses = list(dict.fromkeys(parsed.address or drafter.addresses))
    if not addresses:
        raise ConfigError(
            "--address: none, and the config has neither drafters.addresses nor drafters.weights_from; name where the "
            "drafters listen"
        )
    check_addresses("--address", addresses)
    version = int(time.time()) if parsed.version is None else parsed.version
    folder = str(Path(parsed.weights).absolute())
    if not _is_utf8(folder):
        raise ConfigError(f"--weights: {folder!r} is not UTF-8, as messages to drafters have to be; rename the folder")
    if len(folder) > _LONGEST_PATH:
        fix = f"no drafter can open more than {_LONGEST_PATH}: name a shorter path"
        raise ConfigError(f"--weights: a path of {len(folder)} characters; {fix}")
    secret = shared_secret(addresses)
    from nemo_specrollout.remote.protocol.publishing import publish

    # The folder is not looked for here, because it is a path on the drafters' machines.
    errors = publish(addresses, secret, folder, version)
    for address, error in errors.items():
        print(f"{address}: {error}")
    if errors:
        raise ConfigError(
            f"--weights: {len(errors)} of {len(addresses)} drafters did not take {parsed.weights}, for the reasons above; a "
            "drafter that refuses it goes on with its old weights"
        )
    print(f"version {version} is in use at {len(addresses)} of {len(addresses)} drafters")
    return 0


def _publish_to_folder(drafter: RemoteDrafterConfig, into: str, weights: Path, version: int | None) -> int:
    """Copies the checkpoint `weights` to the folder `into`, which drafters watch. Returns 0.

    Raises ConfigError if the drafters would refuse the checkpoint.
    """
    from nemo_specrollout.storage import model_folder, weights_folder

    try:
        known = Path(drafter.model)
        own = known if known.is_dir() else weights  # a name on the Hub has no tensors to compare with here
        weights_folder.check_like(weights, model_folder.tensor_shapes(model_folder.tensor_files(own)))
    except ValueError as error:
        raise ConfigError(f"--weights: {error}") from error
    newest = next((p.number for p in weights_folder.publications(Path(into))), -1)
    try:
        number = max(int(time.time()), newest + 1) if version is None else version
        path = weights_folder.publish(weights, Path(into), number)
    except ValueError as error:
        raise ConfigError(f"--version: {error}") from error
    print(f"published {path}; drafters with this weights_from load it within seconds")
    return 0


def _is_utf8(text: str) -> bool:
    """Tells whether `text`, from the command line, can be encoded as UTF-8.

    If the command line has bytes that are not UTF-8, Python represents them by lone surrogates, which cannot be encoded.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _remote_drafter(tree: Mapping[str, Any]) -> RemoteDrafterConfig:
    """Returns the remote drafter that a config names. Raises ConfigError if the config names none."""
    block = build(SpecrolloutConfig, at(tree, BLOCK_PATH) or {}, BLOCK_PATH)
    if block.remote is None:
        raise ConfigError(f"{BLOCK_PATH}.drafters: none of type remote; name one, with the folder of its model")
    return block.remote


def _in_words(status: "DrafterReport") -> str:
    share = status.busy_s / status.up_s if status.up_s else 0.0
    why = f" (the latest: {status.refusal})" if status.refusal else ""
    held = f" (newer ones cannot be used: {status.weights_problem})" if status.weights_problem else ""
    return (
        f"{status.num_open} requests; {status.num_drafted:,} tokens drafted in {status.num_steps:,} steps, "
        f"{status.num_corrections:,} corrections; busy {share:.0%} of {status.up_s:.0f} s; "
        f"{status.num_refused_frames} messages refused or lost{why}; weights of version {status.draft_version}{held}"
    )

# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout serve-drafter` and `publish-draft`: remote drafters that the user starts and updates."""

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_specrollout.cli.command_line import use_threads
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import RemoteDrafterConfig, check_address, shared_secret
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.nemo_rl_tree import VLLM_CFG, at
from nemo_specrollout.config.strict import ConfigError, build

if TYPE_CHECKING:
    from nemo_specrollout.remote.drafter.drafter_spec import DrafterReport


def serve_drafter(parsed: argparse.Namespace) -> int:
    """Drafts until interrupted. Raises ConfigError, as far as possible before anything is loaded."""
    check_address("--address", parsed.address)
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
    """Has all drafters at the config's `addresses` load the weights; returns 0 if all did.

    Raises ConfigError if a drafter refuses, which then keeps its weights.
    """
    drafter = _remote_drafter(load_config(parsed.config, parsed.overrides))
    if not drafter.addresses:
        raise ConfigError("drafters.addresses: empty; name the addresses at which the drafters listen")
    if not parsed.weights.is_dir():
        raise ConfigError(f"--weights: {parsed.weights} is not a folder; name a checkpoint of the draft model")
    from nemo_specrollout.remote.protocol.transport import publish

    version = int(time.time()) if parsed.version is None else parsed.version
    if not 0 <= version < 2**63:
        raise ConfigError(f"--version: {version} is out of range; it must be at least 0 and below 2^63")
    errors = publish(drafter.addresses, shared_secret(drafter.addresses), str(parsed.weights.absolute()), version)
    for address, error in errors.items():
        print(f"{address}: {error}")
    if errors:
        raise ConfigError(
            f"--weights: {len(errors)} of {len(drafter.addresses)} drafters did not take {parsed.weights}"
        )
    print(f"{len(drafter.addresses)} drafters draft with version {version}")
    return 0


def _remote_drafter(tree: Mapping[str, Any]) -> RemoteDrafterConfig:
    """Returns the drafter of type remote in a config of the local runner or NeMo-RL. Raises ConfigError if it has none."""
    block = build(SpecrolloutConfig, at(tree, BLOCK_PATH) or {}, BLOCK_PATH)
    if block.remote is None:
        raise ConfigError(f"{BLOCK_PATH}.drafters: none of type remote; name one, with the folder of its model")
    return block.remote


def _in_words(status: "DrafterReport") -> str:
    share = status.busy_s / status.up_s if status.up_s else 0.0
    return (
        f"{status.num_open} requests; {status.num_drafted:,} tokens drafted in {status.num_steps:,} steps, "
        f"{status.num_corrections:,} corrections; busy {share:.0%} of {status.up_s:.0f} s; "
        f"{status.num_refused_frames} frames refused"
    )

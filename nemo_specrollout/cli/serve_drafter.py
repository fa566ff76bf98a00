# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout serve-drafter`: a drafter by hand, on any machine, for the verifiers that name its address."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_specrollout.cli.prepare import use_threads
from nemo_specrollout.config.addresses import check_address, shared_secret
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import RemoteDrafterConfig
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.nemo_rl_traps import VLLM_CFG, at
from nemo_specrollout.config.run_config import VllmConfig
from nemo_specrollout.config.strict import ConfigError, build

if TYPE_CHECKING:
    from nemo_specrollout.remote.verifier.drafter_process import Status

DEFAULT_ADDRESS = "tcp://127.0.0.1:5570"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What it takes besides CONFIG and key=value."""
    text = f"where to listen; default {DEFAULT_ADDRESS}"
    command.add_argument("--address", default=DEFAULT_ADDRESS, metavar="tcp://HOST:PORT", help=text)


def serve_drafter(parsed: argparse.Namespace) -> int:
    """Drafts until interrupted. Raises ConfigError before anything is loaded, where it can."""
    check_address("--address", parsed.address)
    shared_secret([parsed.address])
    drafter, engine = remote_of(load_config(parsed.config, parsed.overrides))
    on_cpu = not Path("/dev/nvidia0").exists()
    if on_cpu:
        use_threads()
    from rich.console import Console

    from nemo_specrollout.remote.drafter.drafter_service import DrafterService
    from nemo_specrollout.remote.verifier.drafter_pool import drafter_spec

    spec = drafter_spec(drafter, engine, parsed.address, on_cpu=on_cpu)
    console = Console(highlight=False)
    with console.status(f"loading {drafter.model}"):
        service = DrafterService(spec)
    console.print(f"drafting with {drafter.model} at {service.status.address}; Ctrl-C ends it")
    try:
        with console.status("no requests yet") as line:
            service.run(lambda status: line.update(in_words(status)))
    finally:
        service.close()
    return 0


def remote_of(tree: Mapping[str, Any]) -> tuple[RemoteDrafterConfig, VllmConfig]:
    """The drafter of type remote in a config, of the local runner or NeMo-RL, and what it must know of the policy's engine.

    Raises ConfigError if there is none.
    """
    block = build(SpecrolloutConfig, at(tree, BLOCK_PATH) or {}, BLOCK_PATH)
    if block.remote is None:
        raise ConfigError(f"{BLOCK_PATH}.drafters: none of type remote; name one, with the folder of its model")
    from nemo_specrollout.remote.verifier.drafter_pool import engine_facts

    return block.remote, engine_facts(at(tree, VLLM_CFG) or {})


def in_words(status: "Status") -> str:
    """What a drafter does, in a line."""
    share = status.busy_s / status.up_s if status.up_s else 0.0
    return (
        f"{status.num_open} requests; {status.num_drafted:,} tokens drafted in {status.num_steps:,} steps, "
        f"{status.num_corrections:,} corrections; busy {share:.0%} of {status.up_s:.0f} s; "
        f"{status.num_refused_frames} frames refused"
    )

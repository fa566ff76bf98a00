# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout serve-drafter`: a remote drafter that the user starts."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_specrollout.cli.command_line import use_threads
from nemo_specrollout.config.block import BLOCK_PATH, SpecrolloutConfig
from nemo_specrollout.config.drafter_configs import check_address, shared_secret
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
    block = build(SpecrolloutConfig, at(tree, BLOCK_PATH) or {}, BLOCK_PATH)
    if (drafter := block.remote) is None:
        raise ConfigError(f"{BLOCK_PATH}.drafters: none of type remote; name one, with the folder of its model")
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


def _in_words(status: "DrafterReport") -> str:
    share = status.busy_s / status.up_s if status.up_s else 0.0
    return (
        f"{status.num_open} requests; {status.num_drafted:,} tokens drafted in {status.num_steps:,} steps, "
        f"{status.num_corrections:,} corrections; busy {share:.0%} of {status.up_s:.0f} s; "
        f"{status.num_refused_frames} frames refused"
    )

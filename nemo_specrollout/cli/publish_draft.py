# SPDX-License-Identifier: Apache-2.0
"""`nemo-specrollout publish-draft`: drafters on other workers go on with the weights in a folder."""

import argparse
import time
from pathlib import Path

from nemo_specrollout.cli.serve_drafter import remote_of
from nemo_specrollout.config.addresses import shared_secret
from nemo_specrollout.config.load import load_config
from nemo_specrollout.config.strict import ConfigError


def add_arguments(command: argparse.ArgumentParser) -> None:
    """What it takes besides CONFIG and key=value."""
    command.add_argument("--weights", type=Path, required=True, metavar="DIR", help="a checkpoint of the draft model")
    command.add_argument("--version", type=int, help="of the weights; default: the time, in seconds")


def publish_draft(parsed: argparse.Namespace) -> int:
    """Tells all drafters in `addresses` of the config. Raises ConfigError if one does not take the weights: it keeps its."""
    drafter, _ = remote_of(load_config(parsed.config, parsed.overrides))
    if not drafter.addresses:
        raise ConfigError("drafters.addresses: empty; name where the drafters listen that are to be told")
    if not parsed.weights.is_dir():
        raise ConfigError(f"--weights: {parsed.weights} is not a folder")
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

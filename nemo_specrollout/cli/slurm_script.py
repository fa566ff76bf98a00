# SPDX-License-Identifier: Apache-2.0
"""Shell files of a launched run and the `sbatch` line that submits it; NeMo-RL's `ray.sub` does the rest."""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from nemo_specrollout.cli.slurm_settings import ClusterSettings
from nemo_specrollout.nemo_rl.installation import ACTORS

SHARED_ENVIRONMENTS = {ours: native for native, ours in ACTORS.items()}
"""Names of our Ray actors, each with the NeMo-RL actor whose Python environment it shares.

NeMo-RL names an environment after its actor.
"""
_HEADER = (
    "# SPDX-License-Identifier: Apache-2.0\n# Written by `nemo-specrollout launch`, which overwrites it each time.\n"
)


@dataclass(frozen=True)
class Job:
    """One job of a run."""

    settings: ClusterSettings
    run: str
    """Absolute path of the run directory."""
    num_nodes: int
    gpus_per_node: int
    max_num_steps: int | None
    """Steps after which the run is complete; None if the config does not say."""
    script: str
    """NeMo-RL's script, relative to its checkout."""

    @property
    def name(self) -> str:
        """Job name, unique to the run directory. Slurm's `singleton` runs jobs of one name one after another."""
        word = re.sub(r"[^A-Za-z0-9._-]", "-", Path(self.run).name)
        return f"specrollout-{word}-{hashlib.sha256(self.run.encode()).hexdigest()[:8]}"

    def sbatch(self) -> list[str]:
        """Returns the command that submits the job, with all options: SBATCH_* variables overrule options in a script."""
        settings = self.settings
        return [
            "sbatch", "--parsable", f"--nodes={self.num_nodes}", "--exclusive", f"--account={settings.account}",
            f"--partition={settings.partition}", f"--time={settings.time}", f"--job-name={self.name}",
            "--dependency=singleton", "--requeue", "--open-mode=append", "--export=ALL",
            f"--output={self.run}/slurm/%j.out", *settings.sbatch_args, f"{self.run}/job.sh",
        ]  # fmt: skip

    def files(self) -> dict[str, str]:
        """Returns the text of each shell file by its name."""
        return {"env.sh": self._env(), "setup.sh": self._setup(), "job.sh": self._job()}

    def _env(self) -> str:
        settings, run = self.settings, self.run
        mounts = [f"{run}:{run}", f"{settings.nemo_rl}:{settings.nemo_rl}", *settings.mounts]
        variables = {
            "CONTAINER": settings.container,
            "MOUNTS": ",".join(dict.fromkeys(mounts)),
            "GPUS_PER_NODE": str(self.gpus_per_node),
            "SETUP_COMMAND": f"bash {quote(f'{run}/setup.sh')}",
            "COMMAND": self._command(),
            "BASE_LOG_DIR": f"{run}/slurm",
            # Working folder of ray.sub in the container: `uv run` has to be called in the checkout.
            "SLURM_SUBMIT_DIR": settings.nemo_rl,
            # cluster.num_nodes counts every node, so the head is no extra one.
            "DEDICATED_RAY_HEAD": "0",
            # Otherwise all engines would write compiled kernels beside the code, on a shared disk, at once.
            "NUMBA_CACHE_DIR": f"/tmp/nemo_specrollout_numba_{os.getuid()}",
            **settings.environment,
        }
        literal = "# Values are taken as they are written.\n# shellcheck disable=SC2016\n"
        return _HEADER + literal + "".join(f"export {name}={quote(value)}\n" for name, value in variables.items())

    def _command(self) -> str:
        """Returns the command for ray.sub's head: NeMo-RL's driver, which passes its PYTHONPATH to all workers."""
        addon, config = quote(f"{self.run}/addon"), quote(f"{self.run}/config.yaml")
        path = f"PYTHONPATH={addon}${{PYTHONPATH:+:$PYTHONPATH}}"
        return f"{path} uv run python -m nemo_specrollout.cli.main run {config} --script {quote(self.script)}"

    def _setup(self) -> str:
        links = "".join(f"  share_environment {native} {ours}\n" for ours, native in SHARED_ENVIRONMENTS.items())
        own = f"\n# From the cluster file.\n{self.settings.setup_command}\n" if self.settings.setup_command else ""
        return f"""#!/bin/bash
{_HEADER}# Runs in the container, on each node, before Ray starts.

# NeMo-RL looks for a Python environment with the name of the actor class. These links give our actors the environments that
# the container has; without them every node would build its own.
environments="${{NEMO_RL_VENV_DIR:-{self.settings.nemo_rl}/venvs}}"
share_environment() {{
  if [[ -x "$environments/$1/bin/python" && ! -e "$environments/$2" ]]; then
    ln -sfn "$environments/$1" "$environments/$2"
  fi
}}
if [[ "${{NRL_FORCE_REBUILD_VENVS:-false}}" != "true" ]]; then
{links}fi
{own}"""

    def _job(self) -> str:
        return f"""#!/bin/bash
{_HEADER}set -euo pipefail
{self._stop_when_complete()}
# These variables belong to the Python that ran `launch`. The container has its own.
unset OMP_NUM_THREADS PYTHONHOME PYTHONPATH VIRTUAL_ENV
# shellcheck source=/dev/null
source {quote(f"{self.run}/env.sh")}
exec bash {quote(f"{self.settings.nemo_rl}/ray.sub")}
"""

    def _stop_when_complete(self) -> str:
        if self.max_num_steps is None:
            return ""
        return f"""
if [[ -d {quote(f"{self.run}/checkpoints/step_{self.max_num_steps}")} ]]; then
  echo "nemo-specrollout: all {self.max_num_steps} steps are done"
  exit 0
fi
"""

# SPDX-License-Identifier: Apache-2.0
"""A real Slurm on this machine, whose nodes are namespaces: `with RealSlurm(folder, num_nodes=4) as slurm: ...`.

Each node has a network address, a host name, process numbers, a `/tmp` and a `/dev/shm` of its own. All other folders are
shared, as on a cluster. Nothing outside the folder is written, and the machine's own network, hosts file and processes are
not touched, because the login node lives in namespaces too, and the kernel ends all that is in them with their first process.
"""

import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).parent
OTHER_SLURM = "SLURM_OF_TESTS"
"""Variable with a folder of `get_slurm.sh`, whose Slurm the cluster has in place of this machine's."""
OF_SLURM = ("usr/sbin/slurmctld", "usr/sbin/slurmd", "usr/bin/sbatch", "usr/sbin/munged", "usr/include/slurm/spank.h")
PROGRAMS = ("gcc", "ip", "unshare", "nsenter")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
"""States of a job that neither waits nor runs."""
PACKAGES = "slurm-wlm munge libslurm-dev gcc iproute2"
"""Debian's packages that bring Slurm and the programs."""
FREEZER = Path("/sys/fs/cgroup/freezer")
"""Where a machine with control groups of version 1 keeps the kind by which Slurm knows the processes of a job."""
PARTITIONS = """
PartitionName=batch Nodes={all} Default=YES MaxTime=1-00:00:00 State=UP
PartitionName=open Nodes={all} MaxTime=INFINITE State=UP
PartitionName=few_gpus Nodes=few[1-2] MaxTime=INFINITE State=UP
PartitionName=no_gpus Nodes=cpu[1-2] MaxTime=INFINITE State=UP
PartitionName=low Nodes={all} MaxTime=INFINITE GraceTime=60 State=UP
PartitionName=high Nodes={all} MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP
"""
"""The nodes `few` have 4 GPUs and the nodes `cpu` none. Nothing runs on them, so no daemon stands behind them.
Jobs of `high` take nodes from jobs of the other partitions, and those of `low` get a minute's warning before."""
CONFIGURATION = """
ClusterName=here
SlurmctldHost=login(10.77.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
PlugStackConfig={folder}/etc/plugstack.conf
JobSubmitPlugins=lua
CliFilterPlugins=lua
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
KillWait=3
ReturnToService=2
MpiDefault=none
GresTypes=gpu
SlurmdParameters=config_overrides
SlurmdTimeout=15
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
Prolog={folder}/etc/prolog
NodeName={all} NodeAddr=10.77.0.[11-{last}] CPUs=16 CoresPerSocket=16 RealMemory=20000 Gres=gpu:{gpus}
NodeName=few[1-2] NodeAddr=10.77.0.[101-102] CPUs=16 RealMemory=20000 Gres=gpu:4 State=DOWN
NodeName=cpu[1-2] NodeAddr=10.77.0.[111-112] CPUs=16 RealMemory=20000 State=DOWN
"""


JOB_SUBMIT = """
function slurm_job_submit(job, partitions, user)
  local closed = io.open("{folder}/closed")
  if closed ~= nil then
    closed:close()
    slurm.log_user("The site takes no more jobs of yours.")
    return slurm.ERROR
  end
  if job.account ~= nil and job.account ~= "acc" then
    return slurm.ESLURM_INVALID_ACCOUNT
  end
  return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, user)
  return slurm.SUCCESS
end
"""
"""The site's rules in the controller, in place of an accounting database: there is one account, and a limit of jobs."""
CLI_FILTER = """
function slurm_cli_setup_defaults(options, early)
  return slurm.SUCCESS
end
function slurm_cli_pre_submit(options, offset)
  if os.getenv("BANNER_OF_THE_SITE") then
    print(os.getenv("BANNER_OF_THE_SITE"))
  end
  return slurm.SUCCESS
end
function slurm_cli_post_submit(offset, job, step)
  if os.getenv("LAST_JOB_OF_THE_USER") and not os.getenv("SLURM_JOB_ID") then -- an srun of the job asks here, too
    io.open("{folder}/closed", "w"):close()
  end
  return slurm.SUCCESS
end
"""
"""The site's greeting, which Slurm's commands print where the variable is set, and the limit of jobs that it reaches."""
PROLOG = """#!/bin/bash
[[ ! -e {folder}/broken ]]
"""
"""What each node does before a job. It fails where the test has broken the nodes."""


def other_slurm() -> Path | None:
    """Returns the folder with the Slurm that `SLURM_OF_TESTS` names; None for this machine's own."""
    named = os.environ.get(OTHER_SLURM)
    return Path(named).resolve() if named else None


def slurm_root() -> Path:
    """Returns the folder below which the cluster's Slurm has its `usr`."""
    return other_slurm() or Path("/")


def reason_against() -> str | None:
    """Returns why this machine cannot have such a cluster, as a sentence that says what to do; None if it can."""
    if os.geteuid() != 0:
        return "a Slurm of its own needs root, for namespaces; run these tests as root"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if missing := [program for program in PROGRAMS if shutil.which(program, path=path) is None]:
        return f"no {', '.join(missing)} on this machine; install Debian's packages {PACKAGES}"
    if missing := [name for name in OF_SLURM if not (slurm_root() / name).exists()]:
        fix = "make it with get_slurm.sh" if other_slurm() else f"install Debian's packages {PACKAGES}"
        return f"no {', '.join(missing)} below {slurm_root()}; {fix}"
    made = subprocess.run(
        ["unshare", "--mount", "--net", "--uts", "--ipc", "--pid", "--cgroup", "--fork", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        return f"this machine makes no namespaces ({made.stderr.strip()}); run these tests outside a container"
    return None


class RealSlurm:
    """Owns a cluster of `num_nodes` nodes, n1, n2, ..., from entering to leaving the context, below a folder of its own.

    The folder must be readable by all users, and its path short enough for a socket (90 characters).
    """

    def __init__(
        self, folder: Path, num_nodes: int = 4, gpus: int = 8, shared: Sequence[Path] = (), disk_mib: int = 16
    ) -> None:
        self.folder, self.num_nodes, self.gpus, self.shared, self.disk_mib = folder, num_nodes, gpus, shared, disk_mib
        self._login: subprocess.Popen[bytes] | None = None
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._group = FREEZER / f"slurm-of-tests-{os.getpid()}"

    def __enter__(self) -> "RealSlurm":
        try:
            self._write_files()
            self._start_login_node()
            for name in self.names:
                self.start_node(name)
            self.wait_for_idle_nodes()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def names(self) -> list[str]:
        """The names of the nodes."""
        return [f"n{number}" for number in range(1, self.num_nodes + 1)]

    @property
    def configuration(self) -> Path:
        """The file that `SLURM_CONF` names."""
        return self.folder / "etc" / "slurm.conf"

    @property
    def small_disk(self) -> Path:
        """A folder of `disk_mib` MiB that the login node and the nodes see, and this machine does not."""
        return self.folder / "small_disk"

    def stop(self) -> None:
        """Ends the nodes, the login node and all of their processes, and removes the control group."""
        for name in list(self._nodes):
            self.kill_node(name)
        if self._login is not None:
            _end(self._login)
            self._login = None
        if self._group.is_dir():
            _remove_group(self._group)

    def start_node(self, name: str) -> None:
        """Starts a node, which says to the controller that it is there."""
        namespace = ["nsenter", f"--net=/run/netns/{name}"]
        own = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        script = ["bash", str(HERE / "compute_node.sh"), str(self.folder), name, *map(str, self.shared)]
        with (self.folder / "log" / f"{name}.node").open("ab") as log:
            self._nodes[name] = subprocess.Popen(
                [*self._inside(), *namespace, *own, *script], stdin=subprocess.PIPE, stdout=log, stderr=log
            )

    def kill_node(self, name: str) -> None:
        """Ends all processes of a node at once, as a power failure does."""
        _end(self._nodes.pop(name))

    def cut_off(self, name: str) -> None:
        """Takes a node's network away. Its disks stay, as with a file system on a network of its own."""
        self._set_link(name, "down")

    def join_again(self, name: str) -> None:
        """Gives a node its network back."""
        self._set_link(name, "up")

    @contextmanager
    def without_controller(self) -> Iterator[None]:
        """Stops Slurm's controller for a while. It keeps its state, as when a site restarts it."""
        pid = (self.folder / "run" / "slurmctld.pid").read_text().strip()
        self.command(
            ["bash", "-c", f"scontrol shutdown slurmctld; while kill -0 {pid} 2> /dev/null; do sleep 0.1; done"]
        )
        try:
            yield
        finally:
            started = self.command(["slurmctld", "-f", str(self.configuration)])
            assert started.returncode == 0, started.stderr
            while self.command(["squeue"]).returncode != 0:
                time.sleep(0.2)

    @contextmanager
    def without_munge(self) -> Iterator[None]:
        """Takes munge's socket away for a while, so that no command reaches Slurm."""
        socket = self.folder / "munge" / "socket"
        away = socket.rename(socket.with_name("away"))
        try:
            yield
        finally:
            away.rename(socket)

    def _set_link(self, name: str, state: str) -> None:
        done = self.command(["ip", "link", "set", f"v{name[1:]}", state])
        if done.returncode != 0:
            raise RuntimeError(done.stderr)

    def wait_for_idle_nodes(self) -> None:
        """Waits until every node has nothing to do. Raises RuntimeError with what Slurm says after five minutes."""
        for _ in range(1500):
            done = self.command(
                ["sinfo", "--noheader", "--Node", "--partition=open", "--states=idle", "--format=%N %t"]
            )
            if sum(line.endswith(" idle") for line in done.stdout.splitlines()) == self.num_nodes:
                return
            time.sleep(0.2)
        log = self.folder / "log"
        logs = "\n".join(f"{path.name}: {path.read_text()[-800:]}" for path in sorted(log.iterdir()))
        raise RuntimeError(f"the nodes did not get idle: {self.command(['sinfo', '-N', '-l']).stdout}\n{logs}")

    def command(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        user: int = 0,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the login node, as a user, and returns what it said; `environment` is laid over this process's."""
        variables = {**os.environ, "SLURM_CONF": str(self.configuration), **(environment or {})}
        who = [f"--setuid={user}", f"--setgid={user}"] if user else []
        return subprocess.run(
            [*self._inside(), *who, "env", f"--chdir={cwd or self.folder}", *command],
            env=variables, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    def job(self, job_id: str) -> dict[str, str]:
        """Returns what `scontrol show job` says of a job, by its names."""
        done = self.command(["scontrol", "--oneliner", "show", "job", job_id])
        if done.returncode != 0:
            raise RuntimeError(f"scontrol ended with {done.returncode}: {done.stderr}")
        return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)

    def wait_for_state(self, job_id: str, *states: str) -> dict[str, str]:
        """Waits until a job is in one of the states, and returns what Slurm says of it then."""
        while (job := self.job(job_id))["JobState"] not in states:
            time.sleep(0.1)
        return job

    def processes_on(self, name: str) -> list[str]:
        """Returns the command lines of a node's processes beside the node's own two, which are its shell and slurmd."""
        namespace = (self.folder / "nodes" / name / "process_namespace").read_text().strip()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(process / "ns" / "pid") == namespace:
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip())
            except OSError:
                continue  # it has ended, or it is a zombie
        own = (f"bash {HERE / 'compute_node.sh'} ", "slurmd -D ")
        return [command for command in found if command and not command.startswith(own)]

    def wait_until_empty(self, name: str) -> None:
        """Waits until no process of a job is on a node. Raises RuntimeError if one stays for a minute."""
        for _ in range(300):
            if not (left := self.processes_on(name)):
                return
            time.sleep(0.2)
        raise RuntimeError(f"{name} still has {left}")

    def _inside(self) -> list[str]:
        """Returns the beginning of a command that runs on the login node."""
        assert self._login is not None
        pid = self._login.pid
        (first,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return ["nsenter", f"--target={first}", "--mount", "--net", "--uts", "--ipc", "--pid", "--cgroup"]

    def _start_login_node(self) -> None:
        if FREEZER.is_dir():
            self._group.mkdir()
            (self.folder / "control_group").symlink_to(self._group)
        with (self.folder / "log" / "login.node").open("wb") as log:
            self._login = subprocess.Popen(
                ["bash", str(HERE / "login_node.sh"), str(self.folder), str(self.num_nodes), str(self.disk_mib)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        while not (self.folder / "login_is_up").exists():
            if self._login.poll() is not None:
                raise RuntimeError(f"the login node ended: {(self.folder / 'log' / 'login.node').read_text()}")
            time.sleep(0.05)

    def _write_files(self) -> None:
        self.folder.chmod(0o755)
        for name in ("etc", "state", "log", "run", "gpus", "munge", "nodes", "small_disk"):
            (self.folder / name).mkdir()
        for gpu in range(self.gpus):
            os.mknod(self.folder / "gpus" / f"gpu{gpu}", stat.S_IFCHR | 0o666, os.makedev(1, 3))  # as /dev/null
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        plugin = self.folder / "container_stand_in.so"
        headers = f"-I{slurm_root() / 'usr' / 'include'}"  # Slurm takes no plugin that another version's headers made
        subprocess.run(["gcc", "-shared", "-fPIC", headers, "-o", plugin, HERE / "container_stand_in.c"], check=True)
        nodes = f"n[1-{self.num_nodes}]"
        values = {
            "folder": self.folder, "all": nodes, "last": 10 + self.num_nodes, "gpus": self.gpus,
            "tracking": "cgroup" if FREEZER.is_dir() else "linuxproc",
        }  # fmt: skip
        addresses = "".join(f"10.77.0.{10 + number} n{number}\n" for number in range(1, self.num_nodes + 1))
        files = {
            "etc/slurm.conf": (CONFIGURATION + PARTITIONS).format(**values),
            "etc/job_submit.lua": JOB_SUBMIT.format(**values),
            "etc/cli_filter.lua": CLI_FILTER.format(**values),
            "etc/prolog": PROLOG.format(**values),
            "etc/plugstack.conf": f"required {plugin}\n",
            "etc/gres.conf": f"NodeName={nodes} Name=gpu File={self.folder}/gpus/gpu[0-{self.gpus - 1}]\n",
            "etc/cgroup.conf": "CgroupPlugin=cgroup/v1\n" if FREEZER.is_dir() else "",
            "hosts": f"127.0.0.1 localhost\n10.77.0.1 login\n{addresses}",
        }
        for name, text in files.items():
            (self.folder / name).write_text(text)
        (self.folder / "etc" / "prolog").chmod(0o755)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a node by closing its standard input, and waits for it. A node that does not listen is killed."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()  # `--kill-child` takes the node's first process along, and with it all others
        process.wait()


def _remove_group(group: Path) -> None:
    """Removes a control group and those below it, whose processes may take a moment to be gone."""
    for below in sorted(group.rglob("*"), key=lambda path: len(path.parts), reverse=True):
        if below.is_dir():
            _remove_folder(below)
    _remove_folder(group)


def _remove_folder(group: Path) -> None:
    for _ in range(100):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"{group} still has processes: {(group / 'cgroup.procs').read_text().split()}")


@contextmanager
def slurm_in_a_temporary_folder(**options: Any) -> Iterator[RealSlurm]:
    """Brings a cluster with these options of `RealSlurm` up, and afterwards takes it down and its folder away."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        with RealSlurm(folder, **options) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder)

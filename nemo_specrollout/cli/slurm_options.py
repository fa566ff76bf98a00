# SPDX-License-Identifier: Apache-2.0
"""Tells whether a user may give an option of Slurm's `sbatch` in `sbatch_args`, and why not.

It reads options as `sbatch` does. So a long option may be shortened to the first letters of its name, and several options of
one letter may be joined, as in -HN4.
"""

_VALUED = (
    "account/A acctg-freq array/a batch bb bbf begin/b cluster-constraint clusters/M cluster comment constraint/C container "
    "container-id container-type context core-spec/S cores-per-socket cpu-freq cpus-per-gpu cpus-per-task/c deadline "
    "delay-boot dependency/d distribution/m error/e exclude/x export export-file extra extra-node-info/B gid gpu-bind "
    "gpu-freq gpus/G gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint input/i job-name/J "
    "kill-on-invalid-dep licenses/L mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mem-update mincpus "
    "network nodefile/F nodelist/w nodes/N ntasks/n ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket "
    "ntasks-per-tres open-mode output/o partition/p power prefer priority profile qos/q reservation resources segment "
    "signal sockets-per-node switches tasks-per-node thread-spec threads-per-core time/t time-min tmp tres-bind "
    "tres-per-task uid wait-all-nodes wckey workdir wrap chdir/D"
)
_UNVALUED = (
    "autocomplete consolidate-segments contiguous exclusive external get-user-env help/h hold/H ignore-pbs nice no-kill/k "
    "no-requeue oom-kill-step overcommit/O oversubscribe/s parsable propagate quiet/Q reboot requeue resv-ports share "
    "spread-job spread-segments stepmgr test-only usage/u use-min-nodes verbose/v version/V wait/W"
)
"""Names of the options that need no value, although some of them may have one after an =.

A letter after a slash is the short form of the option. The names are those of Slurm 22.05 to 26.05.
"""
_LETTERS = {
    letter: name for name, _, letter in (entry.partition("/") for entry in f"{_VALUED} {_UNVALUED}".split()) if letter
}
_NAMES = {
    entry.partition("/")[0]: needs_value
    for entries, needs_value in ((_VALUED, True), (_UNVALUED, False))
    for entry in entries.split()
}
"""Whether each option needs a value, by the option's long name."""
_SET_BY_LAUNCH = {
    "nodes": "use --nodes of launch",
    "account": "write `account`",
    "partition": "write `partition`",
    "time": "write `time`",
    "export": "write variables into `environment`",
    "requeue": "remove it; with =expedite, Slurm would hold a job that failed, and the jobs behind it would wait",
    **dict.fromkeys(("job-name", "dependency", "exclusive", "output", "error", "open-mode", "parsable"), "remove it"),
}
_REFUSED = {
    **{name: f"is set by launch itself; {fix}" for name, fix in _SET_BY_LAUNCH.items()},
    "array": "would start the run several times at once; use --jobs of launch",
    "autocomplete": "submits nothing; remove it",
    "chdir": "has no use, since the job's script has absolute paths; remove it",
    "container": "would put the job's script into a container; write `container`",
    "container-id": "would put the job's script into a container; write `container`",
    "container-type": "would put the job's script into a container; write `container`",
    "external": "would run no script; remove it",
    "export-file": "would hide the variables of the job; write them into `environment`",
    "get-user-env": "would replace the variables of the job; write what is missing into `environment`",
    "help": "submits nothing; remove it",
    "no-requeue": "would keep a preempted job from continuing; remove it",
    "oversubscribe": "contradicts --exclusive, which launch sets; remove it",
    "quiet": "hides the id of the job; remove it",
    "share": "contradicts --exclusive, which launch sets; remove it",
    "test-only": "submits nothing; use --dry-run of launch",
    "time-min": "lets Slurm end the job before its last checkpoint; write `time`",
    "usage": "submits nothing; remove it",
    "version": "submits nothing; remove it",
    "wait": "would keep launch waiting until the job is over; remove it",
    "workdir": "has no use, since the job's script has absolute paths; remove it",
    "wrap": "would take the place of the job's script; write shell commands into `setup_command`",
}


def option_fault(argument: str) -> str | None:
    """Returns why `launch` refuses an item of `sbatch_args`, as the end of a sentence, or None if it accepts the item.

    Unknown long options are accepted, because they may be those of a plugin that the cluster has.
    """
    if argument.startswith("--"):
        return _long_fault(argument.removeprefix("--"))
    if argument.startswith("-") and len(argument) > 1:
        return _short_fault(argument.removeprefix("-"))
    return "is no option; write e.g. --qos=long, one item for each"


def _long_fault(body: str) -> str | None:
    name, equals, _ = body.partition("=")
    if not name or not all(letter.isalnum() or letter in "-_" for letter in name):
        meant = _REFUSED.get(name.split()[0]) if name.split() else None
        return meant or "is no option; write e.g. --qos=long, one item for each"
    meant_names = [name] if name in _NAMES else [known for known in _NAMES if known.startswith(name)]
    if refused := next((known for known in meant_names if known in _REFUSED), None):
        return _REFUSED[refused]
    if len(meant_names) > 1:
        return f"is short for {', '.join(meant_names)}; write the whole name"
    if name.startswith("container-"):
        return "would put the job's script into a container; write `container` and `mounts`"
    if meant_names and _NAMES[meant_names[0]] and not equals:
        return f"has no value; write --{meant_names[0]}=VALUE as one item"
    return None


def _short_fault(letters: str) -> str | None:
    for position, letter in enumerate(letters):
        name = _LETTERS.get(letter)
        if name is None:
            return "is no option of sbatch; write e.g. --qos=long, one item for each"
        if name in _REFUSED:
            return _REFUSED[name]
        value = letters[position + 1 :]
        if _NAMES[name] and (not value or value[0] in " ="):
            return f"has no value behind its letter; write --{name}=VALUE as one item"
        if _NAMES[name]:
            return None
    return None

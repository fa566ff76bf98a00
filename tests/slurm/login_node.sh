#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# login_node.sh FOLDER NUM_NODES DISK_MIB: the login node of real_slurm.py's cluster, with Slurm's controller and munge.
# It lives in namespaces of its own, below which the nodes are, and as long as its standard input is open. When its first
# process ends, the kernel ends every process of the cluster and takes its networks and mounts away.
set -eu
folder=$1 num_nodes=$2 disk_mib=$3
if [[ "${4:-}" != inside ]]; then
  for group in "$folder"/control_group; do # a link, where the machine has control groups of version 1
    if [[ -d "$group" ]]; then echo $$ > "$group/cgroup.procs"; fi
  done
  exec unshare --cgroup --mount --net --uts --ipc --pid --fork --kill-child --mount-proc bash "$0" "$@" inside
fi
hostname login
if [[ -n "${SLURM_OF_TESTS:-}" ]]; then # a folder of get_slurm.sh, whose usr lies over the machine's here and on the nodes
  mount -t overlay -o "lowerdir=$SLURM_OF_TESTS/usr:/usr" overlay /usr
  for plugins in "$SLURM_OF_TESTS"/usr/lib/*/slurm-wlm; do # without those of the machine's Slurm
    mount --bind "$plugins" "${plugins#"$SLURM_OF_TESTS"}"
  done
fi
if [[ -d "$folder/control_group" ]]; then
  umount /sys/fs/cgroup/freezer
  mount -t cgroup -o freezer none /sys/fs/cgroup/freezer
fi
mount --bind "$folder/hosts" /etc/hosts
mount -t tmpfs tmpfs /run
mount -t tmpfs -o size="${disk_mib}m" tmpfs "$folder/small_disk"
ip link set lo up
ip link add br0 type bridge
ip addr add 10.77.0.1/24 dev br0
ip link set br0 up
for ((node = 1; node <= num_nodes; node++)); do
  ip netns add "n$node"
  ip link add "v$node" type veth peer name eth0 netns "n$node"
  ip link set "v$node" master br0 up
  ip -n "n$node" addr add "10.77.0.$((10 + node))/24" dev eth0
  ip -n "n$node" link set eth0 up
  ip -n "n$node" link set lo up
done
munged --socket="$folder/munge/socket" --key-file="$folder/munge/key" --pid-file="$folder/munge/pid" \
  --seed-file="$folder/munge/seed" --log-file="$folder/log/munged.log"
slurmctld -c -f "$folder/etc/slurm.conf"
touch "$folder/login_is_up"
read -r _

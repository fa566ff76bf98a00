#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# compute_node.sh FOLDER NAME SHARED...: a node of real_slurm.py's cluster, in namespaces of its own. It lives as long as its
# standard input is open. Its /tmp and /dev/shm are its own; the other folders, and those of SHARED, are the machine's, as
# on a cluster's shared file system.
set -eu
folder=$1 name=$2
shift 2
hostname "$name"
own="$folder/nodes/$name"
mkdir -p "$own/tmp"
chmod 1777 "$own/tmp"
readlink /proc/self/ns/pid > "$own/process_namespace"
for shared in "$folder" "$@"; do
  if [[ "$shared" == /tmp/* ]]; then
    mkdir -p "$own$shared"
    mount --rbind "$shared" "$own$shared"
  fi
done
mount --rbind "$own/tmp" /tmp
mount -t tmpfs -o size=1g tmpfs /dev/shm
slurmd -D -f "$folder/etc/slurm.conf" -N "$name" < /dev/null > "$folder/log/$name.out" 2>&1 &
read -r _ # this shell is the first process of its namespace, so it also collects what jobs leave behind

#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# get_slurm.sh FOLDER "deb URL SUITE COMPONENT...": unpacks the Slurm of another release of Debian or Ubuntu below FOLDER, with
# all libraries that it needs (about 150 MB), and installs nothing. The tests run on it with SLURM_OF_TESTS=FOLDER.
# `deb [signed-by=KEYRING] URL ...` names a keyring that this machine's apt does not know.
set -eu
mkdir -p "$1"
folder=$(cd "$1" && pwd) source=$2
apt=$folder/apt
mkdir -p "$apt"/{parts,lists/partial,cache/archives/partial}
touch "$apt/status"
echo "$source" > "$apt/sources.list"
cat > "$apt/apt.conf" << END
Dir::Etc::SourceList "$apt/sources.list";
Dir::Etc::SourceParts "$apt/parts";
Dir::Etc::PreferencesParts "$apt/parts";
Dir::State "$apt";
Dir::State::Status "$apt/status";
Dir::Cache "$apt/cache";
Acquire::Languages "none";
APT::Sandbox::User "root";
APT::Install-Recommends "false";
END
export APT_CONFIG=$apt/apt.conf
# A mirror that is kept as it was on some day is older than its release file allows. Signatures are checked as ever.
apt-get -o Acquire::Check-Valid-Until=false update
apt-get install --yes --download-only slurm-client slurmctld slurmd slurm-wlm-basic-plugins libslurm-dev libpmix2 munge
dpkg-deb --show "$apt"/cache/archives/slurmctld_*.deb
for package in "$apt"/cache/archives/*.deb; do
  dpkg-deb --extract "$package" "$folder"
done
for program in "$folder"/usr/sbin/slurm*-wlm; do # installed packages make these links
  ln -sf "${program##*/}" "${program%-wlm}"
done
rm -r "$apt"

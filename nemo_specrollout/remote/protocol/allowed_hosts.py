# SPDX-License-Identifier: Apache-2.0
"""The hosts whose messages a drafter reads."""

import socket
from collections.abc import Iterator, Sequence

from nemo_specrollout.config.addresses import Network, network_of
from nemo_specrollout.config.strict import ConfigError


class AllowedHosts:
    """Tells whether a drafter accepts messages from a host. Owns the networks of the option `allowed_hosts`.

    Names of hosts are looked up once, when the object is built.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        """Takes IP addresses, networks and names. An empty list allows all hosts. Raises ConfigError for an unknown name."""
        self._networks = [network for host in hosts for network in _networks(host)]

    def __contains__(self, address: str) -> bool:
        """Returns whether the host at an IP address is allowed."""
        if not self._networks:
            return True
        host = network_of(address)
        return host is not None and any(host.network_address in network for network in self._networks)


def _networks(host: str) -> Iterator[Network]:
    network = network_of(host)
    if network is not None:
        yield network
        return
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        fix = "write its IP address, or make the name known there"
        raise ConfigError(f"allowed_hosts: {host!r} is unknown to the drafter's machine ({error}); {fix}") from None
    for *_, place in found:
        network = network_of(str(place[0]))
        if network is not None:
            yield network

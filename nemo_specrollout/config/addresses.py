# SPDX-License-Identifier: Apache-2.0
"""Checks addresses of remote drafters (tcp://HOST:PORT), and the names of hosts that may ask remote drafters for drafts.

It checks only how they are written, and looks up no name.
"""

import ipaddress
import re
from collections.abc import Sequence

from nemo_specrollout.config.strict import ConfigError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_ADDRESS = re.compile(r"tcp://(?:\[([^\[\]]*)\]|([^\[\]:/]*)):([0-9]{1,5})")
_NAME = re.compile(r"[0-9A-Za-z_](?:[0-9A-Za-z_.-]*[0-9A-Za-z_])?")
_ZONE = re.compile(r"[0-9A-Za-z_.-]+")


def any_port(host: str) -> str:
    """Returns an address tcp://HOST:0, with which a socket listens at any free port of this machine's IP address `host`."""
    return f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"


def split_address(address: str) -> tuple[str, int]:
    """Returns the host and the port of an address tcp://HOST:PORT. An IPv6 address is returned without its brackets.

    Raises ValueError if the text is not such an address.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match[3]) > 65535:
        raise ValueError(f"{address!r} is not an address")
    in_brackets, name, port = match.groups()
    if in_brackets is None:
        if not is_host_name(name):
            ipaddress.IPv4Address(name)
    elif ipaddress.IPv6Address(in_brackets).scope_id is not None and not _ZONE.fullmatch(in_brackets.split("%")[1]):
        raise ValueError(f"{in_brackets!r} does not end with the name of an interface")
    return name if in_brackets is None else in_brackets, int(port)


def is_host_name(text: str) -> bool:
    """Tells whether `text` can be the name of a machine.

    The answer is False if the part after the last dot is a number, because programs read such a text as an IPv4 address.
    """
    return _NAME.fullmatch(text) is not None and not text.rpartition(".")[2].isdecimal()


def is_loopback(address: str) -> bool:
    """Tells whether only this machine can reach `address`. Returns False if the text is not an address."""
    try:
        host, _ = split_address(address)
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_listening_address(path: str, address: str) -> None:
    """Raises ConfigError if a remote drafter cannot listen at `address`. Port 0 stands for any free port.

    `path` is the name of the field in the error's message.
    """
    _checked(path, address)


def check_addresses(path: str, addresses: Sequence[str]) -> None:
    """Raises ConfigError if one of `addresses` is not the address of a remote drafter, or if two of them are the same.

    `path` is the name of the field in the error's message.
    """
    known: dict[tuple[str, int], str] = {}
    for address in addresses:
        host, port = _checked(path, address)
        if port == 0:
            raise ConfigError(f"{path}: {address!r} has port 0, where nothing listens; write the port of the drafter")
        if _is_unspecified(host):
            raise ConfigError(
                f"{path}: {address!r} is the address of no machine; write the one of the drafter's machine"
            )
        place = (host if is_host_name(host) else str(ipaddress.ip_address(host)), port)
        if place in known:
            raise ConfigError(f"{path}: {address!r} and {known[place]!r} are the same drafter; write it once")
        known[place] = address


def check_allowed_hosts(path: str, hosts: Sequence[str]) -> None:
    """Raises ConfigError if one of `hosts` is neither an IP address, nor a network, nor the name of a machine.

    `path` is the name of the field in the error's message.
    """
    for host in hosts:
        if network_of(host) is None and not is_host_name(host):
            raise ConfigError(f"{path}: {host!r} {_why_no_host(host)}")
        if _is_unspecified(host):
            raise ConfigError(f"{path}: {host!r} is the address of no machine; {_ALLOW_ALL}")


def network_of(host: str) -> Network | None:
    """Returns `host` as a network if it is a network, such as 10.0.0.0/8, or an IP address. Otherwise returns None.

    The network of an IP address has only this address. The zone of an IPv6 address is ignored. An IPv6 address that stands for
    an IPv4 address is replaced by the IPv4 address.
    """
    try:
        if "/" in host:
            return ipaddress.ip_network(host)
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return ipaddress.ip_network(address if mapped is None else mapped)


_ALLOW_ALL = "leave the list empty to allow every host that knows the secret"


def _checked(path: str, address: str) -> tuple[str, int]:
    """Returns the host and the port of an address tcp://HOST:PORT.

    Raises ConfigError if `address` is not such an address. Also raises it for a link-local IPv6 address that does not name its
    network interface, because no socket can use it.
    """
    try:
        host, port = split_address(address)
    except ValueError:
        everywhere = ", or tcp://0.0.0.0:PORT to listen at all IPv4 addresses" if "*" in address else ""
        example = f"write tcp://HOST:PORT, e.g. tcp://127.0.0.1:5570 or tcp://[::1]:5570{everywhere}"
        raise ConfigError(f"{path}: {address!r} is not an address; {example}") from None
    if ":" in host and ipaddress.IPv6Address(host).is_link_local and "%" not in host:
        fix = f"write it with its interface, e.g. tcp://[{host}%eth0]:{port}"
        raise ConfigError(f"{path}: {address!r} exists on each interface of a machine; {fix}")
    return host, port


def _is_unspecified(host: str) -> bool:
    return not is_host_name(host) and "/" not in host and ipaddress.ip_address(host).is_unspecified


def _why_no_host(host: str) -> str:
    """Returns the end of a sentence that says what is wrong with an entry of `allowed_hosts`, and what to write instead."""
    if "*" in host:
        return f"is no host; {_ALLOW_ALL}, or write a network such as 10.0.0.0/24"
    try:
        return f"has bits beyond its prefix; write {ipaddress.ip_network(host, strict=False)}, or one address"
    except ValueError:
        fix = "write 10.0.0.7, 10.0.0.0/24, fd00::7 or node01, without blanks, brackets or a port"
        return f"is neither an IP address, nor a network, nor a host name; {fix}"

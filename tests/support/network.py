"""Network namespaces that a relay joins: a network whose delay, bandwidth and loss a test chooses.

    with network(3, delay=0.01, rate="40mbit", loss=0.01) as names: ...

Each namespace has a device ``eth0``, one end of a veth pair. The relay has the other ends and
passes every packet on after a delay. ``tc tbf`` limits the bandwidth, and ``nft`` drops packets on
arrival. Nothing outside the namespaces is touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from unittest import SkipTest

_ALL = 3  # ETH_P_ALL
_SIOCETHTOOL = 0x8946
_OFFLOADS = (0x15, 0x17, 0x1F, 0x24, 0x2C)  # ETHTOOL_SRXCSUM, STXCSUM, STSO, SGSO, SGRO


@contextlib.contextmanager
def network(
    ranks: int, delay: float = 0.0, rate: str = "", loss: float = 0.0
) -> Iterator[list[str]]:
    """The names of the namespaces. Skips the test, with the reason, where the machine lacks one."""
    if os.geteuid() != 0:
        raise SkipTest("network namespaces need root")
    for tool in ("ip", "tc", "nft"):
        if shutil.which(tool) is None:
            raise SkipTest(f"{tool} is not installed (Debian: iproute2, nftables)")
    hub, *names = (f"fa{os.getpid()}-{n}" for n in range(ranks + 1))
    with contextlib.ExitStack() as undo:
        for name in (hub, *names):
            _run("ip", "netns", "add", name)
            undo.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
        for n, name in enumerate(names):
            peer = ("peer", "name", f"port{n}", "netns", hub)
            _run("ip", "link", "add", "eth0", "netns", name, "type", "veth", *peer)
            _run("ip", "-n", name, "addr", "add", f"10.77.0.{n + 1}/24", "dev", "eth0")
            for namespace, device in ((name, "lo"), (name, "eth0"), (hub, f"port{n}")):
                _run("ip", "-n", namespace, "link", "set", device, "up")
            if rate:
                limit = ("rate", rate, "burst", "32kb", "latency", "400ms")
                _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
            if loss:
                _run("ip", "netns", "exec", name, "nft", "-f", "-", text=_rules(loss))
        relay = ("ip", "netns", "exec", hub, sys.executable, __file__, str(delay), str(ranks))
        process = subprocess.Popen(relay, stdout=subprocess.PIPE, text=True)
        undo.callback(process.wait)
        undo.callback(process.kill)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise SkipTest("the relay has no raw sockets")
        for name in names:  # checksums by the sender, and packets that fit the device
            _run("ip", "netns", "exec", name, sys.executable, __file__, "eth0")
        yield names


def dropped(name: str) -> int:
    """How many packets nft has dropped in a namespace."""
    listed = _run("ip", "netns", "exec", name, "nft", "list", "ruleset").split()
    return int(listed[listed.index("packets") + 1])


def _rules(loss: float) -> str:
    """Rules of nftables that drop a share of all packets."""
    return (
        "table ip loss { chain arriving { type filter hook input priority 0; "
        f"meta l4proto tcp numgen random mod 1000 < {round(1000 * loss)} counter drop; }}; }}"
    )


def _run(*command: str, text: str | None = None) -> str:
    """Run a command; skip the test if the system refuses it."""
    found = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if found.returncode:
        raise SkipTest(f"{' '.join(command)}: {found.stderr.strip()}")
    return found.stdout


# --- in the namespaces ---------------------------------------------------------------------------


def _relay(delay: float, ports: int) -> None:
    """Pass each packet on to the port of its address, ``delay`` seconds later."""
    sockets = []
    for n in range(ports):
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
        port.bind((f"port{n}", _ALL))
        sockets.append(port)
    print("ready", flush=True)
    of_address: dict[bytes, int] = {}
    waiting: list[tuple[float, int, int, bytes]] = []  # when, the order, from, packet
    order = 0
    while True:
        left = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
        for port in select.select(sockets, [], [], left)[0]:
            packet, (_, _, kind, *_) = port.recvfrom(1 << 16)
            if kind != socket.PACKET_OUTGOING:
                order += 1
                item = (time.monotonic() + delay, order, sockets.index(port), packet)
                heapq.heappush(waiting, item)
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, source, packet = heapq.heappop(waiting)
            of_address[packet[6:12]] = source
            known = of_address.get(packet[:6])  # else broadcast, like an ARP request
            targets = set(range(ports)) - {source} if known is None else {known}
            for n in targets:
                with contextlib.suppress(OSError):  # a device that is down
                    sockets[n].send(packet)


def _without_offloads(device: str) -> None:
    """Turn the device's offloads off, so that packets have their real sizes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in _OFFLOADS:
            value = (ctypes.c_uint32 * 2)(command, 0)  # struct ethtool_value
            request = struct.pack("16sP", device.encode(), ctypes.addressof(value))
            fcntl.ioctl(control, _SIOCETHTOOL, request)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _relay(float(sys.argv[1]), int(sys.argv[2]))
    else:
        _without_offloads(sys.argv[1])

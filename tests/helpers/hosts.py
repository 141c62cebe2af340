"""Hosts of their own, as far as a process can tell, on one machine: network, host name, boot id and shared memory.

A host is a network namespace with an address on a bridge that this process has an address on too.  A process enters it
with ``python tests/helpers/hosts.py JSON ...`` (or forked as that script), which adds a mount and a UTS namespace of
its own.  All of it needs root.  Namespaces and bridges are named by the process that made them, and removed after it.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import os
import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

_NETWORK, _MOUNTS, _NAMES = 0x40000000, 0x20000, 0x4000000  # CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWUTS
_NAMESPACES = "/run/netns"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NOBODY = 65534
INTERFACE = "wc0"  # of each host
_serial = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Host:
    """One host.

    Attributes:
        name: Its host name, which no other host resolves.
        address: Its address, which the others reach.
        gateway: This process's address, which the host reaches.
        namespace: Name of the network namespace.
        boot_id: File with its boot id.
    """

    name: str
    address: str
    gateway: str
    namespace: str
    boot_id: str

    @staticmethod
    def read(text: str) -> Host:
        """A host from what ``write`` wrote."""
        return Host(**json.loads(text))

    def write(self) -> str:
        """This host as JSON."""
        return json.dumps(asdict(self))

    @property
    def id(self) -> str:
        """The id by which its processes know it."""
        return Path(self.boot_id).read_text().strip()

    def command(self, argv: Sequence[str]) -> list[str]:
        """Arguments of Python that run others (``-m MODULE ...``) on this host."""
        return [__file__, self.write(), *argv]

    def enter_network(self) -> None:
        """Gives the calling thread this host's network; its sockets keep it."""
        with open(f"{_NAMESPACES}/{self.namespace}") as namespace:
            _check(_libc.setns(namespace.fileno(), _NETWORK), "setns")

    def limit(self, mbit_s: int) -> None:
        """Lets this host send no more than so many Mbit a second."""
        rate = ("rate", f"{mbit_s}mbit", "burst", "256kb", "latency", "400ms")
        subprocess.run(["tc", "-n", self.namespace, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *rate], check=True)

    def cut_off(self) -> None:
        """Takes this host from the network, without a word to anybody."""
        _ip("-n", self.namespace, "link", "set", INTERFACE, "down")

    def come_back(self) -> None:
        """Ends ``cut_off``."""
        _ip("-n", self.namespace, "link", "set", INTERFACE, "up")

    def sent_bytes(self, interface: str = INTERFACE) -> int:
        """Bytes that this host has sent to others so far, with all headers; with ``"lo"``, to itself."""
        shown = ["ip", "-n", self.namespace, "-json", "-statistics", "link", "show", interface]
        [link] = json.loads(subprocess.run(shown, check=True, capture_output=True).stdout)
        return int(link["stats64"]["tx"]["bytes"])


def cannot() -> str:
    """The reason why this machine cannot make hosts; empty if it can."""
    if os.geteuid() != 0:
        return "hosts of their own need root"
    tried = subprocess.run(
        ["unshare", "-n", "-m", "-u", "sh", "-c", "ip link add wct type bridge && mount -t tmpfs none /dev/shm"],
        capture_output=True,
        text=True,
    )
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


def clear_up() -> None:
    """Removes the hosts and bridges of processes that are gone: one that a signal kills leaves them."""
    found = subprocess.run(["ip", "-json", "link", "show", "type", "bridge"], check=True, capture_output=True).stdout
    bridges = [link["ifname"] for link in json.loads(found or "[]")]
    spaces = os.listdir(_NAMESPACES) if os.path.isdir(_NAMESPACES) else []
    for names, pattern, what in ((spaces, r"wc-(\d+)-\d+", "netns"), (bridges, r"wcb(\d+)", "link")):
        for name in names:
            owner = re.fullmatch(pattern, name)
            if owner is not None and not os.path.exists(f"/proc/{owner[1]}"):
                # Another process may clear up at the same time.
                subprocess.run(["ip", what, "del", name], check=False, capture_output=True)


@contextmanager
def hosts(names: Sequence[str], folder: Path) -> Iterator[list[Host]]:
    """Makes hosts that reach each other and this process; the folder gets their boot ids."""
    clear_up()
    mark = os.getpid()
    subnet = f"10.{100 + mark // 250 % 100}.{mark % 250}"
    bridge = f"wcb{mark}"
    with ExitStack() as stack:
        stack.callback(_ip, "link", "del", bridge)
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{subnet}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        found: list[Host] = []
        for number, name in enumerate(names, 2):
            namespace, outside = f"wc-{mark}-{number}", f"wcv{mark}-{next(_serial)}"  # a link goes some time later
            stack.callback(_ip, "netns", "del", namespace)
            _ip("netns", "add", namespace)
            _ip("link", "add", outside, "type", "veth", "peer", "name", INTERFACE, "netns", namespace)
            _ip("link", "set", outside, "master", bridge, "up")
            _ip("-n", namespace, "addr", "add", f"{subnet}.{number}/24", "dev", INTERFACE)
            for interface in (INTERFACE, "lo"):
                _ip("-n", namespace, "link", "set", interface, "up")
            boot_id = folder / f"{name}.boot_id"
            boot_id.write_text(f"{number:08d}-1111-2222-3333-444444444444\n")
            address, gateway = f"{subnet}.{number}", f"{subnet}.1"
            found.append(Host(name, address, gateway, namespace, str(boot_id)))
        yield found


def enter(host: Host) -> None:
    """Moves this process to a host; it must have one thread."""
    host.enter_network()
    appear_on(host)


def show_interfaces() -> None:
    """Lets UCX see the interfaces of the host that this process has entered: it looks for them in ``/sys``."""
    subprocess.run(["mount", "-t", "sysfs", "none", "/sys"], check=True)


def appear_on(host: Host) -> None:
    """As ``enter``, but this process stays in the network that it is in."""
    _check(_libc.unshare(_MOUNTS | _NAMES), "unshare")
    socket.sethostname(host.name)
    for command in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "--bind", host.boot_id, _BOOT_ID],
        ["mount", "-t", "tmpfs", "none", "/dev/shm"],
    ):
        subprocess.run(command, check=True)


def become_another_user() -> None:
    """Gives up root, so the kernel refuses this process the memory of the trainer's."""
    importlib.import_module("encodings.idna")  # Python loads it late, and its files may be readable for root alone
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def _check(code: int, call: str) -> None:
    if code:
        raise OSError(ctypes.get_errno(), call)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _main() -> None:
    enter(Host.read(sys.argv[1]))
    show_interfaces()
    if sys.argv[2] != "-m":
        raise SystemExit("what follows the host must be -m MODULE ...")
    sys.argv = sys.argv[3:]
    sys.path[0] = os.getcwd()  # as for -m; this file's folder has modules that are nobody else's business
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()

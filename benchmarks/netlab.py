"""Several hosts on one machine: network namespaces on one switch, links shaped in both directions.

    with Lab(hosts=2, rate="1gbit") as lab:
        lab.run([["python", "train.py"]] * 2)  # rank i on host i

Every host has its own address, host name and link `veth0`; a token bucket (`tc tbf`) at both ends
of each link gives it its rate. Linux, root and iproute2 are needed.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from secrets import token_hex
from types import TracebackType

from benchmarks.processes import rank_environment, run_ranks

SUBNET = "10.77.0"  # the same in every lab: each has its own switch, so none sees another
PORT = 29500


def unavailable() -> str | None:
    """Why this process cannot make a `Lab`, or None if it can."""
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found (on Debian: apt install iproute2 util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        return "this container may not make network namespaces (it lacks CAP_SYS_ADMIN)"
    return None


class Lab:
    """A context manager: hosts 0 ... `hosts` - 1 exist within it, and nothing of them after it.

    Args:
        hosts: how many, each with one link to the common switch.
        rate: of every link, as `tc` writes it ("1gbit", "100mbit"); None leaves them unshaped.

    Raises:
        ValueError: if `hosts` or `rate` is not of that form.
        RuntimeError: on entering, if namespaces cannot be made here, saying why.
    """

    def __init__(self, hosts: int = 2, rate: str | None = None) -> None:
        if not 1 <= hosts <= 254:
            raise ValueError(f"`Lab(hosts=...)` must be in 1 ... 254, got {hosts}.")
        check_rate(rate)
        name = f"lab{token_hex(3)}"  # unique, so that labs of other processes are never touched
        self.hosts = tuple(f"{name}h{i}" for i in range(hosts))
        self._switch = f"{name}sw"
        self._initial_rate = rate
        self._undo = ExitStack()

    def __enter__(self) -> "Lab":
        if reason := unavailable():
            raise RuntimeError(f"no network lab here: {reason}.")
        with ExitStack() as undo:  # undone here if anything below fails or is interrupted
            _add_namespace(self._switch, undo)
            _run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "br0", "up")
            for i in range(len(self.hosts)):
                self._add_host(i, undo)
            self.rate(self._initial_rate)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.close()

    def run(self, commands: Sequence[Sequence[str]], timeout: float | None = None) -> list[str]:
        """Run `commands[i]` on host i as rank i, all at once.

        `benchmarks.processes.run_ranks` says what comes back and what is raised.
        """
        if len(commands) != len(self.hosts):
            raise ValueError(
                f"`Lab.run(commands)` takes one per host ({len(self.hosts)}), got {len(commands)}."
            )
        entered = [self.entered(i, command) for i, command in enumerate(commands)]
        environments = [self.environment(i) for i in range(len(commands))]
        return run_ranks(entered, environments, timeout)

    def entered(self, i: int, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on host i, in the process it is started as."""
        return [*_enter(self.hosts[i]), *command]

    def environment(self, i: int) -> dict[str, str]:
        """What has the process on host i take part as rank i."""
        world_size = len(self.hosts)
        return rank_environment(i, world_size, address=_address(0), port=PORT, interface="veth0")

    def rate(self, rate: str | None) -> None:
        """Shape all links, in both directions, to `rate`; None leaves them unshaped."""
        check_rate(rate)
        # A switch's short queue. The bucket holds 1 ms of 1 Gbit/s; far faster links want more.
        shape = ["tbf", "rate", rate, "burst", "128kb", "latency", "10ms"] if rate else ["noqueue"]
        for i, host in enumerate(self.hosts):
            for namespace, device in ((host, "veth0"), (self._switch, _port(i))):
                _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape)

    def cut(self, i: int) -> None:
        """Unplug host i from the switch."""
        _run("ip", "-n", self._switch, "link", "set", _port(i), "down")

    def mend(self, i: int) -> None:
        """Plug host i in again."""
        _run("ip", "-n", self._switch, "link", "set", _port(i), "up")

    def _add_host(self, i: int, undo: ExitStack) -> None:
        host = self.hosts[i]
        # `ip netns exec` shows this file to the host as /etc/hosts.
        names = Path("/etc/netns", host)
        undo.callback(shutil.rmtree, names, ignore_errors=True)
        names.mkdir(parents=True)
        # Twice, because torch looks up the addresses of peers in IPv6's notation.
        lines = [
            f"{prefix}{_address(j)} {other}"
            for j, other in enumerate(self.hosts)
            for prefix in ("", "::ffff:")
        ]
        (names / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

        _add_namespace(host, undo)
        peer = ["peer", "name", _port(i), "netns", self._switch]
        _run("ip", "link", "add", "veth0", "netns", host, "type", "veth", *peer)
        _run("ip", "-n", self._switch, "link", "set", _port(i), "master", "br0", "up")
        _run("ip", "-n", host, "addr", "add", f"{_address(i)}/24", "dev", "veth0")
        _run("ip", "-n", host, "link", "set", "veth0", "up")
        _run("ip", "-n", host, "link", "set", "lo", "up")


def check_rate(rate: str | None) -> None:
    """Raise ValueError unless `rate` is None or a rate such as "1gbit"."""
    if rate is not None and not re.fullmatch(r"\d+(\.\d+)?[kmg]bit", rate):
        raise ValueError(f"`rate` must be like '1gbit' or '100mbit', or None, got {rate!r}.")


def _address(i: int) -> str:
    return f"{SUBNET}.{i + 1}"


def _port(i: int) -> str:
    """The switch's end of host i's link."""
    return f"p{i}"


def _enter(host: str) -> list[str]:
    """The words before a command that make it run on `host`, under that host name."""
    rename = 'hostname "$0"; exec "$@"'
    return ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", rename, host]


def _add_namespace(name: str, undo: ExitStack) -> None:
    # Registered first: an interrupt in between then finds nothing to delete, which is no error.
    undo.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True, check=False)
    _run("ip", "netns", "add", name)


def _run(*command: str) -> None:
    """Run a short configuration command; its own words are the error if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")

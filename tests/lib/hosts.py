# SPDX-License-Identifier: Apache-2.0
"""Several simulated hosts on one machine: network namespaces on a bridge, each with its own host name. MPI between them
uses TCP. Needs root and `ip`; Hosts.missing() names a missing requirement."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

NUMBERS = itertools.count()


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class Hosts:
    def __init__(self, count: int, folder: Path) -> None:
        self.prefix = f"rs{os.getpid()}-{next(NUMBERS)}"
        self.network = f"10.77.{os.getpid() % 250}"
        self.count = count
        self.agent = folder / f"{self.prefix}.agent"
        self.made: list[str] = []

    @staticmethod
    def missing() -> str:
        """Why hosts cannot be created; '' if they can."""
        for tool in ("ip", "unshare", "mpirun"):
            if not shutil.which(tool):
                return f"the command '{tool}' is missing"
        try:
            with tempfile.TemporaryDirectory() as folder, Hosts(2, Path(folder)) as made:
                for host in range(2):
                    run(*made.inside(host), "true")
        except subprocess.CalledProcessError as error:
            return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
        return ""

    def namespace(self, host: int) -> str:
        return f"{self.prefix}-{host}"

    def address(self, host: int) -> str:
        return f"{self.network}.{host + 1}"

    def inside(self, host: int) -> list[str]:
        """The command prefix that runs a command on a host."""
        return [
            "ip",
            "netns",
            "exec",
            self.namespace(host),
            "unshare",
            "--uts",
            "sh",
            "-c",
            'hostname "$0"; exec "$@"',
            self.namespace(host),
        ]

    def link(self, host: int, state: str) -> None:
        run("ip", "-n", self.namespace(host), "link", "set", "net0", state)

    def traffic(self, host: int, passes: bool) -> None:
        """Whether the switch passes packets of a host. Unlike with link(), no host notices a change."""
        run(
            "ip",
            "-n",
            f"{self.prefix}-s",
            "link",
            "set",
            f"port{host}",
            *(("master", "bridge") if passes else ("nomaster",)),
        )

    def __enter__(self) -> Hosts:
        try:
            switch = f"{self.prefix}-s"
            for name in (switch, *map(self.namespace, range(self.count))):
                run("ip", "netns", "add", name)
                self.made.append(name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", switch, "link", "add", "name", "bridge", "type", "bridge")
            run("ip", "-n", switch, "link", "set", "bridge", "up")
            for host in range(self.count):
                run(
                    "ip",
                    "link",
                    "add",
                    "name",
                    "net0",
                    "netns",
                    self.namespace(host),
                    "type",
                    "veth",
                    "peer",
                    "name",
                    f"port{host}",
                    "netns",
                    switch,
                )
                run("ip", "-n", switch, "link", "set", f"port{host}", "master", "bridge", "up")
                run("ip", "-n", self.namespace(host), "addr", "add", f"{self.address(host)}/24", "dev", "net0")
                self.link(host, "up")
            # Replaces ssh: mpirun uses it to start its daemon on an address.
            cases = "\n".join(f"{self.address(host)}) name={self.namespace(host)} ;;" for host in range(self.count))
            self.agent.write_text(
                f"#!/bin/sh\ncase $1 in\n{cases}\nesac\nshift\n"
                'exec ip netns exec $name unshare --uts sh -c \'hostname "$0"; exec sh -c "$1"\' $name "$*"\n'
            )
            self.agent.chmod(0o755)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.made:  # kill processes that still run there
            for process in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
                with contextlib.suppress(ProcessLookupError):  # the process has already ended
                    os.kill(int(process), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        self.agent.unlink(missing_ok=True)

    def mpirun(self, ranks: int) -> list[str]:
        """The mpirun command for `ranks` ranks in equal blocks on the hosts; the caller appends
        `-n` and the program."""
        each = -(-ranks // self.count)
        hosts = ",".join(f"{self.address(host)}:{each}" for host in range(self.count))
        subnet = f"{self.network}.0/24"
        # All hosts share this machine's cores. Open MPI takes them for the cores of each host, and its
        # waits would not yield.
        return [
            *self.inside(0),
            "mpirun",
            "--mca",
            "plm_rsh_agent",
            str(self.agent),
            "--mca",
            "btl",
            "self,vader,tcp",
            "--mca",
            "btl_tcp_if_include",
            subnet,
            "--mca",
            "oob_tcp_if_include",
            subnet,
            "--mca",
            "mpi_yield_when_idle",
            "1",
            "--host",
            hosts,
        ]

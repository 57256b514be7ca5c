# SPDX-License-Identifier: Apache-2.0
"""Runs a program under mpirun with separate output and exit status of each process."""

import contextlib
import os
import signal
import subprocess
import time

# Allows root, and more processes than cores.
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
# mpirun does not report the exit status of each process, nor when it ended.
WRAPPER = """"$@" >out.$OMPI_COMM_WORLD_RANK 2>&1 &
echo $! >pid.$OMPI_COMM_WORLD_RANK.new; mv pid.$OMPI_COMM_WORLD_RANK.new pid.$OMPI_COMM_WORLD_RANK
wait $!; echo $? >exit.$OMPI_COMM_WORLD_RANK.new; mv exit.$OMPI_COMM_WORLD_RANK.new exit.$OMPI_COMM_WORLD_RANK
exit 0
"""


class Launch:
    """A program under mpirun, in a new folder with out.RANK, pid.RANK and exit.RANK for each process and out.mpirun.
    Other processes continue if one fails."""

    def __init__(self, folder, mpirun, ranks, program, environment=None):
        """mpirun: the command before `-n`."""
        self.folder = folder
        self.ranks = range(ranks)
        folder.mkdir()
        with (folder / "out.mpirun").open("w") as output:
            self.mpirun = subprocess.Popen(
                [*mpirun, "--enable-recovery", "-n", str(ranks), "sh", "-c", WRAPPER, "sh", *program],
                cwd=folder,
                env=os.environ | ENVIRONMENT | (environment or {}),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def read(self, name):
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def texts(self):
        """The output of all processes."""
        return "".join(self.read(f"out.{rank}") for rank in self.ranks)

    def process(self, rank):
        """Waits until the process of a rank exists and returns its number."""
        for _ in range(2000):
            if text := self.read(f"pid.{rank}"):
                return int(text)
            time.sleep(0.005)
        raise AssertionError("a process did not start")

    def wait(self, seconds, ranks=()):
        """The exit status by rank; None if the process has not ended within `seconds`."""
        ranks = ranks or self.ranks
        end = time.monotonic() + seconds
        while time.monotonic() < end and not all(self.read(f"exit.{rank}") for rank in ranks):
            time.sleep(0.02)
        return {rank: int(text) if (text := self.read(f"exit.{rank}")) else None for rank in ranks}

    def end(self):
        for rank in self.ranks:
            if (text := self.read(f"pid.{rank}")) and not self.read(f"exit.{rank}"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(text), signal.SIGKILL)
        try:
            self.mpirun.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.mpirun.pid, signal.SIGKILL)
            self.mpirun.wait()

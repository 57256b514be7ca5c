# SPDX-License-Identifier: Apache-2.0
"""The messenger over UCX between two simulated hosts: data both ways, and a peer that is killed or cut off."""

import os
import subprocess
import time
import unittest

import hosts
from commands import BIN, FolderTest

MISSING = hosts.Hosts.missing()
CHILD = "MessengerChild.Runs"
SILENT = 10  # kUnresponsiveSeconds of executor/interfaces/messenger.h
GRACE = 10  # seconds that a loaded machine may need in addition


@unittest.skipUnless((BIN / "libreshard_ucx.so").exists(), "libreshard_ucx.so was not built")
@unittest.skipIf(MISSING, f"several hosts cannot be simulated: {MISSING}")
class TwoHosts(FolderTest):
    def start(self, made, host, test, **environment):
        program = [*made.inside(host), BIN / "test-executor_backends", f"--gtest_filter={test}"]
        process = subprocess.Popen(program, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def wait_for(self, name, process):
        end = time.monotonic() + 60
        while not (self.folder / name).exists():
            self.assertLess(time.monotonic(), end, f"no {name}")
            self.assertIsNone(process.poll(), f"the process has ended before {name} was written")
            time.sleep(0.02)
        return (self.folder / name).read_bytes()

    def connect(self, made, test):
        """Starts a test on one host and its peer on the other; returns both when they are connected."""
        parent = self.start(made, 0, f"Of/Hosts.{test}/ucx", RESHARD_TEST_FOLDER=str(self.folder))
        address = self.wait_for("address", parent)
        child = self.start(made, 1, CHILD, RESHARD_TEST_ADDRESS=address.hex(), RESHARD_TEST_APART="")
        self.wait_for("connected", parent)
        return parent, child

    def lose(self, end_peer):
        """Ends the peer, and returns the seconds until it is lost, and the reason."""
        with hosts.Hosts(2, self.folder) as made:
            parent, child = self.connect(made, "APeerThatEndsOrIsCutOffIsLost")
            begin = time.monotonic()
            end_peer(made, child)
            self.assertEqual(parent.wait(60), 0)
            return time.monotonic() - begin, (self.folder / "reason").read_text()

    def test_killed(self):
        seconds, reason = self.lose(lambda made, child: child.kill())
        self.assertLess(seconds, 2 + GRACE / 2, reason)

    def test_cut_off(self):
        seconds, reason = self.lose(lambda made, child: made.link(1, "down"))
        self.assertGreater(seconds, SILENT / 2, reason)
        self.assertLess(seconds, SILENT + GRACE, reason)

    def test_farewell_after_a_cut(self):
        with hosts.Hosts(2, self.folder) as made:
            parent, child = self.connect(made, "TheFarewellArrivesAfterACut")
            made.traffic(1, False)
            (self.folder / "cut").touch()
            self.wait_for("disconnected", parent)
            made.traffic(1, True)
            begin = time.monotonic()
            self.assertEqual(child.wait(60), 0)
            self.assertLess(
                time.monotonic() - begin, SILENT / 2, "the peer was not told, but found the connection silent"
            )
            (self.folder / "end").touch()
            self.assertEqual(parent.wait(60), 0)


if __name__ == "__main__":
    unittest.main()

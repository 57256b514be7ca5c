# SPDX-License-Identifier: Apache-2.0
"""Pull mode. A source of 4 ranks publishes versions; up to 8 replicas of 2 ranks pull them, join, leave, are killed at
a random moment or at a random system call, are stopped and continued, and lose their network. Each process of a replica
compares its weights with the version that it has pulled, byte by byte (replicas_process.py). One replica is on a host
of its own, where hosts can be simulated. The processes meet in a folder ("file"), or at a store that rank 0 of the
source serves ("tcp"), which no fault concerns.

RESHARD_FULL: 500 rounds; else 40. RESHARD_SMALL: 20."""

import contextlib
import heapq
import itertools
import json
import os
import random
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from pathlib import Path

import hosts
import launchers
import replicas_process as content
from commands import BIN, ROOT, run, shared_folder

FULL = "RESHARD_FULL" in os.environ
ROUNDS = 20 if "RESHARD_SMALL" in os.environ else 500 if FULL else 40
QUIET = 10  # each QUIETth round has no faults: all replicas pull the same version
REPLICAS = 8
REMOTE = 7  # the replica on the other host
PULL = 20  # seconds until a pull gives up; a replica that is not disturbed never does
RELEASE = 1.5  # seconds until a release revokes leases
MARGIN = 3  # seconds that a release may return after its deadline on a loaded machine
START = 60  # seconds that processes may need to start or a quiet round to end on a loaded machine
GRACE = 10  # seconds that an answer may take beyond the deadline of its call on a loaded machine
CONNECT = 25  # seconds until a rank has noticed that its connection is silent, after 10 s, and has connected again
HELD = r"replica \d+ rank \d+ \(world rank \d+\)"  # who held a lease
PROGRAM = Path(content.__file__)
TRACER = ROOT / "tests" / "lib" / "system_calls.py"
MISSING = hosts.Hosts.missing()


class Process:
    """A process of replicas_process.py. One command at a time is asked; `answer` is that of the last one."""

    def __init__(self, command, environment, errors):
        self.errors = errors
        with errors.open("w") as file:
            self.popen = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, bufsize=0
            )
        self.asked, self.since, self.until = ["start"], time.monotonic(), time.monotonic() + START
        self.answer, self.text = {}, b""
        self.stopped = False
        self.ending = False  # it leaves, or is killed

    def ask(self, *words, seconds=0.0):
        assert not self.asked, f"asked {words} before the answer to {self.asked}"
        self.asked, self.since = list(map(str, words)), time.monotonic()
        self.until = self.since + seconds + GRACE
        with contextlib.suppress(BrokenPipeError):  # it has ended, which wait() will read
            self.popen.stdin.write(f"{' '.join(self.asked)}\n".encode())

    def idle(self):
        return not (self.asked or self.stopped)

    def signal(self, number):
        self.popen.send_signal(number)  # no effect if it has been waited for

    def reap(self):
        self.popen.stdin.close()
        self.popen.stdout.close()
        return self.popen.wait()

    def __str__(self):
        errors = self.errors.read_text()[-6000:]
        return f"{self.errors.stem}, asked {self.asked} {time.monotonic() - self.since:.1f} s ago, {errors}"


class Fleet:
    """The processes of a job, which end with the test."""

    def __init__(self, test, model, remote, seed, store):
        self.test, self.model, self.random = test, model, random.Random(seed)
        self.folder = Path(tempfile.mkdtemp(dir=test.folder))
        self.plan = test.plans[model]
        self.hosts = test.enterContext(hosts.Hosts(2, self.folder)) if remote else None
        self.environment = test.environment | {
            "RESHARD_SECRET": "replicas",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.numbers, self.selector, self.later = itertools.count(), selectors.DefaultSelector(), []
        self.processes, self.tracers = [], []
        test.addCleanup(self.end)
        self.rendezvous = self.url(store)
        self.replicas = {}  # the two processes of each; None: it was killed and starts again later
        self.calm = {}  # by replica: when its last fault ended
        self.connected = True  # the host of REMOTE
        self.done = Counter()  # what has happened, for the report
        self.sources = [self.start(rank) for rank in range(content.SOURCES)]
        self.wait(lambda: all(source.idle() for source in self.sources), "the sources start")

    def fail(self, text):
        self.test.fail(f"{text}\nuntil now: {dict(self.done)}")

    # Processes.

    def url(self, store):
        """Where the processes meet: `store` is "file" or "tcp"."""
        if store == "file":
            (self.folder / "store").mkdir()
            return f"file://{self.folder}/store"
        address = self.hosts.address(0) if self.hosts else "127.0.0.1"
        return f"tcp://{address}:{launchers.free_port()}"

    def start(self, rank):
        command, environment = [sys.executable, PROGRAM, self.plan, self.rendezvous, str(rank), self.model], {}
        remote = self.hosts and rank >= content.SOURCES and self.replica_of(rank) == REMOTE
        if self.hosts:
            command = [*self.hosts.inside(int(remote)), *command]
        if remote:  # the hosts share a kernel, which UCX would notice
            environment = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "net0"}
        process = Process(
            command, self.environment | environment, self.folder / f"rank-{rank}.{next(self.numbers)}.txt"
        )
        process.rank = rank
        self.processes.append(process)
        self.selector.register(process.popen.stdout, selectors.EVENT_READ, process)
        return process

    def replica_of(self, rank):
        return (rank - content.SOURCES) // content.REPLICA

    def join(self, number):
        """Starts the processes that a replica lacks."""
        first = content.SOURCES + number * content.REPLICA
        held = self.replicas.get(number, [None] * content.REPLICA)
        self.replicas[number] = [each or self.start(first + i) for i, each in enumerate(held)]
        self.done["starts"] += sum(each is None for each in held)
        self.calm[number] = time.monotonic()

    def disturbed(self, process):
        """Whether a fault of the replica, or its start, overlaps the last call of a process."""
        number = self.replica_of(process.rank)
        faulty = any(each is None or each.stopped or each.ending for each in self.replicas.get(number, [None]))
        cut = number == REMOTE and not self.connected
        return faulty or cut or self.calm[number] >= process.since

    def ranks(self):
        """All processes of replicas."""
        return [process for replica in self.replicas.values() for process in replica if process]

    def end(self):
        for process in self.processes:
            process.signal(signal.SIGKILL)
            process.reap()
        for tracer in self.tracers:
            tracer.wait()
        self.selector.close()

    # Events.

    def at(self, seconds, action, *arguments):
        """Calls an action in so many seconds, when wait() runs."""
        heapq.heappush(self.later, (time.monotonic() + seconds, next(self.numbers), action, arguments))

    def wait(self, true, what, seconds=START):
        """Handles answers until a condition holds. Fails if it does not within so many seconds, or if a process does
        not answer by the deadline of its call."""
        end = time.monotonic() + seconds
        while not true():
            now = time.monotonic()
            while self.later and self.later[0][0] <= now:
                _, _, action, arguments = heapq.heappop(self.later)
                action(*arguments)
            for key, _ in self.selector.select(0.01):
                self.read(key.data)
            for process in self.processes:
                if process.asked and not process.stopped and now > process.until:
                    self.fail(f"no answer by its deadline: {process}")
            if now > end:
                waiting = "\n".join(str(process) for process in self.processes if process.asked)
                self.fail(f"not within {seconds} s: {what}; {waiting}")

    def pause(self, seconds):
        end = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() >= end, "")

    def read(self, process):
        text = os.read(process.popen.stdout.fileno(), 65536)
        if not text:
            self.ended(process)
            return
        *lines, process.text = (process.text + text).split(b"\n")
        for line in lines:
            asked, process.asked, process.answer = process.asked, [], json.loads(line)
            if "error" in process.answer:
                self.fail(f"{asked}: {process.answer['error']}; {process}")
            if asked[0] == "pull":
                self.pulled(process, asked)
            elif asked[0] == "start" and process.rank >= content.SOURCES:
                self.pull(process, 0)

    def ended(self, process):
        self.selector.unregister(process.popen.stdout)
        self.processes.remove(process)
        code, process.asked = process.reap(), []
        if not process.ending:
            self.fail(f"a process has ended with {code}: {process}")
        number = self.replica_of(process.rank)
        left = [None if each is process else each for each in self.replicas.get(number, [])]
        if any(left):
            self.replicas[number] = left
            if None in left:
                self.at(self.random.uniform(0, 2), self.come_back, number)
        else:
            self.replicas.pop(number, None)

    # Calls.

    def pull(self, process, least, seconds=PULL, check=""):
        """`check`: "check" if the pull compares digests, which fails the test if they differ."""
        if process.idle():
            process.ask("pull", least, seconds, check, seconds=seconds)

    def pulled(self, process, asked):
        """Judges the answer to a pull."""
        self.check(process)
        if "late" not in process.answer:
            self.done["pulls"] += 1
            return
        self.done["pulls that gave up"] += 1
        if float(asked[2]) == PULL and not self.disturbed(process):
            self.fail(f"an undisturbed replica pulled nothing within {PULL} s: {process.answer['late']}; {process}")

    def check(self, process):
        if process.answer["torn"]:
            self.fail(f"torn: {process.answer}; {process}")

    def ask_sources(self, *words, seconds=0.0):
        for source in self.sources:
            source.ask(*words, seconds=seconds)
        self.wait(lambda: all(source.idle() for source in self.sources), words[0])
        return [source.answer for source in self.sources]

    def release(self, seconds=RELEASE):
        """Releases; returns the texts of the sources that had to revoke leases."""
        late = []
        for answer in self.ask_sources("release", seconds, seconds=seconds):
            if answer["seconds"] > seconds + MARGIN:
                self.fail(f"release({seconds}) returned after {answer['seconds']:.2f} s: {answer['late']}")
            if answer["late"]:
                late.append(answer["late"])
        self.done["revoked releases"] += len(late)
        return late

    # Faults.

    def kill(self, process):
        if not process.ending:
            process.ending = True
            process.signal(signal.SIGKILL)
            self.done["kills"] += 1

    def come_back(self, number):
        if number in self.replicas:  # else its other process has ended too
            self.join(number)

    def trace(self, process):
        """Begins to count the system calls of a process, which will be killed at one of them."""
        count = int(10 ** self.random.uniform(0, 3.3))
        tracer = subprocess.Popen(
            [sys.executable, TRACER, str(process.popen.pid), str(count), "1"], stdout=subprocess.PIPE, text=True
        )
        if tracer.stdout.readline() == "tracing\n":
            process.ending = True
            self.done["kills at a system call"] += 1
        tracer.stdout.close()
        self.tracers.append(tracer)

    def freeze(self, process):
        if not (process.ending or process.stopped):
            process.stopped = True
            process.signal(signal.SIGSTOP)
            self.done["stops"] += 1
            self.at(self.random.uniform(0.1, 3), self.thaw, process)

    def thaw(self, process):
        process.signal(signal.SIGCONT)
        process.stopped = False
        process.until = max(process.until, time.monotonic() + GRACE)
        self.calm[self.replica_of(process.rank)] = time.monotonic()

    def cut(self, _=None):
        if self.hosts and self.connected:
            self.connected = False
            self.hosts.traffic(1, False)
            self.done["cuts"] += 1
            self.at(self.random.uniform(0.3, 3), self.connect)

    def connect(self):
        self.hosts.traffic(1, True)
        self.connected = True
        self.calm[REMOTE] = time.monotonic()

    def leave(self, number):
        """A replica closes its executors and ends."""
        if all(each and each.idle() for each in self.replicas[number]):
            self.done["leaves"] += 1
            for process in self.replicas.pop(number):
                process.ask("leave", seconds=GRACE)
                process.ending = True
                process.popen.stdin.close()

    def faults(self, version):
        """Faults that happen soon. If the first two versions had no fault of a kind, a later one has, so that few
        rounds have all kinds."""
        chance = self.random.random
        ranks = self.ranks()
        for what, fault in (("kills", self.kill), ("stops", self.freeze)):
            if version > 2 and ranks and not self.done[what]:
                self.at(self.random.uniform(0, 0.1), fault, self.random.choice(ranks))
        for process in ranks:
            soon = self.random.uniform(0, 0.1)
            if chance() < 0.03:
                self.at(soon, self.kill, process)
            elif chance() < 0.02:
                self.at(soon, self.freeze, process)
        if chance() < 0.1:
            self.at(self.random.uniform(0, 0.1), self.cut)

    # Rounds.

    def round(self, version):
        """One version, with faults while it is pulled."""
        absent = [number for number in range(REPLICAS) if number not in self.replicas]
        if absent and self.random.random() < 0.6:
            self.join(self.random.choice(absent))
        elif self.replicas and self.random.random() < 0.15:
            self.leave(self.random.choice(list(self.replicas)))
        idle = [process for process in self.ranks() if process.idle() and not process.ending]
        if idle and self.random.random() < 0.25:
            self.trace(self.random.choice(idle))
        self.ask_sources("publish", version, seconds=START)
        for replica in self.replicas.values():
            least, seconds = self.random.choice((0, version)), self.random.choice((PULL, PULL, PULL, 0.1))
            for process in filter(None, replica):
                self.pull(process, least, seconds, self.random.choice(("", "check")))
        self.faults(version)
        self.pause(self.random.choice((0, 0.02, 0.1, 0.4)))
        for late in self.release():
            if not re.search(HELD, late):
                self.fail(f"release does not name who holds a lease: {late}")

    def holds(self, process, version):
        return process.idle() and (process.answer.get("state"), process.answer.get("version")) == ("complete", version)

    def pull_everywhere(self, version, check=""):
        """All replicas pull a version that is published."""

        def held():
            for process in self.ranks():
                if not self.holds(process, version):
                    self.pull(process, version, check=check)
            return all(self.holds(process, version) for process in self.ranks())

        self.wait(held, f"all replicas hold version {version}")

    def list(self, process, expected):
        """Asks a process for the replicas until they are as expected. A rank whose connection has been ended by an
        earlier cut is lost until it has connected again, without a pull."""
        end = time.monotonic() + CONNECT
        while True:
            process.ask("replicas", seconds=START)
            self.wait(process.idle, "replicas")
            if process.answer["replicas"] == expected:
                return
            if time.monotonic() > end:
                self.fail(f"replicas(): found {process.answer['replicas']}, expected {expected}")
            self.done["lists with a lost replica"] += 1
            self.pause(0.2)

    def quiet_round(self, version):
        """One version that all replicas pull, without faults. Returns what each source uses."""
        self.wait(lambda: not self.later and not any(process.ending for process in self.processes), "the faults end")
        for number in range(REPLICAS):
            if number not in self.replicas:
                self.join(number)
        self.ask_sources("publish", version, seconds=START)
        self.pull_everywhere(version, "check")
        expected = [[number, content.REPLICA, "complete", version] for number in range(REPLICAS)]
        for process in (self.sources[0], self.sources[3], self.replicas[5][1]):
            self.list(process, expected)
        if late := self.release():
            self.fail(f"release revoked leases although all pulls were done: {late}")
        return self.ask_sources("stats")


@unittest.skipUnless((BIN / "libreshard_ucx.so").exists(), "transport ucx was not built")
class ReplicasTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = shared_folder(cls)
        cls.environment = launchers.environment(cls.folder)
        cls.plans = {}
        for model in content.MODELS:
            (cls.folder / f"{model}.yaml").write_text(content.job(model))
            cls.plans[model] = cls.folder / f"{model}.rplan"
            run("reshard-compile", cls.folder / f"{model}.yaml", "-o", cls.plans[model])

    def rounds(self, model, store, seed):
        fleet, used, begin = Fleet(self, model, not MISSING, seed, store), [], time.monotonic()
        for version in range(1, ROUNDS // 2 + 1):
            if version % QUIET:
                fleet.round(version)
            else:
                used.append(fleet.quiet_round(version))
        print(
            f"{model}, {store}: {version} rounds in {time.monotonic() - begin:.0f} s, {dict(fleet.done)}",
            file=sys.stderr,
        )
        for warm, last in zip(used[0], used[-1]):
            self.assertLessEqual(last["threads"], warm["threads"])
            self.assertLessEqual(last["descriptors"], warm["descriptors"] + 16, used)
            self.assertLessEqual(last["kilobytes"], warm["kilobytes"] * 1.1 + 16384, used)
        rare = ("kills at a system call", "leaves") + (("cuts",) if fleet.hosts else ())
        if model == "medium":  # pulls of the small model may all end before a release revokes their leases
            rare += ("revoked releases",)
        for what in ("pulls", "kills", "stops", "starts") + (rare if FULL else ()):
            self.assertGreater(fleet.done[what], 0, what)

    def test_small_model(self):
        self.rounds("small", "file", 1)

    def test_medium_model(self):
        self.rounds("medium", "tcp", 2)

    def alone(self, model, remote=False, number=0):
        """A fleet with one replica, which holds version 1."""
        fleet = Fleet(self, model, remote, 3, "tcp" if remote else "file")
        fleet.join(number)
        fleet.ask_sources("publish", 1, seconds=START)
        fleet.pull_everywhere(1)
        self.assertEqual(fleet.release(), [])
        return fleet

    def release_during(self, fleet, version, fault, heal):
        """Faults at random moments of pulls of versions after a given one, until a release waits for a lease. Returns
        the last version, and the errors of release."""
        for _ in range(40):
            version += 1
            fleet.ask_sources("publish", version, seconds=START)
            for process in fleet.ranks():
                fleet.pull(process, version)
            # A pull takes milliseconds in one host, and a second if TCP waits for packets that the
            # last attempt has lost.
            fleet.pause(10 ** fleet.random.uniform(-3, 0))
            fault()
            late = fleet.release()
            heal()
            if late:
                return version, late
        self.fail("no fault of 40 happened while the replica had a lease")

    def assert_pulls_again(self, fleet, version):
        fleet.ask_sources("publish", version, seconds=START)
        fleet.wait(lambda: all(process.idle() for process in fleet.ranks()), "the pulls end")
        fleet.pull_everywhere(version)
        self.assertEqual(fleet.release(), [])

    def test_a_frozen_replica(self):
        """It loses its lease at the deadline of release, and pulls again when it continues."""
        fleet = self.alone("medium")
        victim = fleet.replicas[0][1]

        def freeze():
            victim.stopped = True
            victim.signal(signal.SIGSTOP)

        version, late = self.release_during(fleet, 1, freeze, lambda: fleet.thaw(victim))
        self.assertRegex(late[0], r"replica 0 rank 1 \(world rank 5\)")
        self.assert_pulls_again(fleet, version + 1)

    @unittest.skipIf(MISSING, f"several hosts cannot be simulated: {MISSING}")
    def test_a_replica_that_is_cut_off(self):
        fleet = self.alone("medium", True, REMOTE)
        version = 1
        for cut, join in (
            ((fleet.hosts.link, "down"), (fleet.hosts.link, "up")),
            ((fleet.hosts.traffic, False), (fleet.hosts.traffic, True)),
        ):
            with self.subTest(cut[0].__name__):
                version, late = self.release_during(
                    fleet, version, lambda: cut[0](1, cut[1]), lambda: join[0](1, join[1])
                )
                self.assertRegex(late[0], r"replica 7 rank [01] \(world rank 1[89]\)")
                version += 1
                self.assert_pulls_again(fleet, version)

    def test_a_source_that_writes_during_a_lease_is_noticed(self):
        """The control of all other tests: the bytes of another version, in one row, are found, by the test
        and by a checked pull."""
        for check, found in (
            ("", r"torn: .*layers.0.up\[47, 0\]: found \d+, expected \d+ of version 2"),
            (
                "check",
                r"RunError: the memory of replica 0 rank \d \(world rank \d\) differs from version "
                r"2 of the source: wrong are the tensors '",
            ),
        ):
            with self.subTest(check):
                fleet = self.alone("small")
                fleet.ask_sources("publish", 2, seconds=START)
                fleet.sources[3].ask("spoil", 3)
                fleet.wait(fleet.sources[3].idle, "spoil")
                self.assertRaisesRegex(AssertionError, found, fleet.pull_everywhere, 2, check)

    def test_the_checker(self):
        """It notices a single bit, anywhere in a weight."""
        for name, tensor in content.MODELS["small"].items():
            dtype = {"u32": "uint32", "fp32": "float16"}[tensor.dtype]
            for rank in range(content.REPLICA):
                shard = content.Shard(name, tensor, rank, content.REPLICA, dtype)
                shard.fill(7)
                self.assertEqual(shard.difference(7), "")
                self.assertRegex(shard.difference(8), r"\[0, 0\]: found .* of version 8")
                held = shard.array.reshape(-1).view("uint8")
                for at in (*range(0, len(held), 97), len(held) - 1):
                    held[at] ^= 1
                    self.assertRegex(shard.difference(7), "; 1 bytes of this chunk differ")
                    held[at] ^= 1


if __name__ == "__main__":
    unittest.main()

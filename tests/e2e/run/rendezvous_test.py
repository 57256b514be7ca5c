# SPDX-License-Identifier: Apache-2.0
"""Processes that no launcher started find each other and run a plan over transport ucx: reshard-exec, once per rank.

RESHARD_FULL: more rounds, starts that are spread over the whole deadline, and more ranks that are killed or stopped."""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest
from pathlib import Path

from commands import BIN, run, shared_folder

JOB = """version: 1
model: {dtype: bf16, tensors: {w: {shape: [4096, 64], shard: {0: tp}}}}
source: {mesh: {tp: %d, dp: %d}}
target: {mesh: {tp: 8}}
"""
# Files on both sides: the tensors are written whole, and the two processes share out the copies.
FILES = """version: 1
model:
  dtype: bf16
  index: {layer: 3}
  tensors: {"layers.{layer}.w": [480, 1024], "layers.{layer}.norm": [1024], head: [1024, 1120]}
source: {storage: %s}
target: {storage: {folder: out, format: %s}}
world: %d
"""
LAUNCHERS = re.compile(
    r"^(RESHARD_SECRET|RESHARD_PORT|RANK|WORLD_SIZE|LOCAL_.*|MASTER_.*|TORCHELASTIC.*|OMPI_.*|PMI.*|SLURM_.*)$"
)
FULL = "RESHARD_FULL" in os.environ
WORLD = 8
START = 20  # seconds that a loaded machine may need to start the processes of a test
GRACE = 10  # seconds that a loaded machine may need to end a process after its deadline
TWICE = r"two processes have joined as rank 2: process \d+ on host [^,]+, and process \d+ on host "
# What servers of other programs send first. The rendezvous's own greeting has 45 bytes.
BANNER = b"220 mail.example.org ESMTP ready, state your name and your business\r\n"


def free_port():
    with socket.socket() as at:
        at.bind(("127.0.0.1", 0))
        return at.getsockname()[1]


def wait_until(true, what):
    end = time.monotonic() + START
    while not true():
        if time.monotonic() > end:
            raise AssertionError(f"not within {START} s: {what}")
        time.sleep(0.02)


def clients(port):
    """The number of connections that a server at a port of 127.0.0.1 has accepted."""
    end, established = f"0100007F:{port:04X}", "01"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return sum(words[1] == end and words[3] == established for words in lines)


class Server:
    """Another program at a port of 127.0.0.1. It sends a banner to each client; if that is empty, it closes each
    connection at once; if it is None, it never accepts one."""

    def __init__(self, banner):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.banner, self.open = banner, []
        if banner is not None:
            threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        try:
            while True:
                client = self.listener.accept()[0]
                if self.banner:
                    client.sendall(self.banner)
                    self.open.append(client)
                else:
                    client.close()
        except OSError:  # the test has ended, or the client has
            return

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        for each in (self.listener, *self.open):
            each.close()


@unittest.skipUnless((BIN / "libreshard_ucx.so").exists(), "transport ucx was not built")
class RendezvousTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = shared_folder(cls)
        cls.plan, cls.other = cls.compile("plan", 4, 2), cls.compile("other", 2, 4)
        cls.random = random.Random(1)

    @classmethod
    def compile(cls, name, tp, dp):
        (cls.folder / f"{name}.yaml").write_text(JOB % (tp, dp))
        subprocess.run(
            [BIN / "reshard-compile", cls.folder / f"{name}.yaml", "-o", cls.folder / name],
            check=True,
            capture_output=True,
        )
        return cls.folder / name

    def start(
        self,
        rank,
        url,
        *options,
        plan=None,
        environment=None,
        timeout=30,
        check=True,
        synthesize=True,
        descriptors=None,
    ):
        """Starts the process of a rank. `environment`: variables of the launcher. Rank, URL or timeout None: without
        that option. `descriptors`: the most that the process may have."""
        clean = {name: value for name, value in os.environ.items() if not LAUNCHERS.match(name)}
        command = [BIN / "reshard-exec", plan or self.plan, "--transport=ucx", "--threads=1", *options]
        command += ["--synthesize"] if synthesize else []
        command += [] if url is None else [f"--rendezvous={url}"]
        command += [] if timeout is None else [f"--timeout={timeout}"]
        command += [] if rank is None else [f"--rank={rank}"]
        command += ["--check"] if check else []
        command = ["prlimit", f"--nofile={descriptors}", *command] if descriptors else command
        process = subprocess.Popen(
            command, env=clean | (environment or {}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.addCleanup(process.communicate)  # cleanups run in reverse order
        self.addCleanup(process.kill)
        return process

    def start_all(self, url, *options, **others):
        return [self.start(rank, url, *options, **others) for rank in range(WORLD)]

    def new_folder(self):
        return Path(tempfile.mkdtemp(dir=self.folder))

    def outputs(self, processes, seconds=60):
        """Standard output, standard error and exit code of each process. Fails if one runs longer than `seconds`."""
        end = time.monotonic() + seconds
        return [
            (*process.communicate(timeout=max(0.1, end - time.monotonic())), process.returncode)
            for process in processes
        ]

    def assert_exact(self, processes):
        for out, err, code in self.outputs(processes):
            self.assertEqual((code, err), (0, ""), out)
            self.assertRegex(out, r"rank \d: [1-9]\d* bytes right")

    def assert_failed(self, processes, patterns, seconds=30, code=3):
        """Each process ends within `seconds` with one error, a line that matches its pattern."""
        for (out, err, found), pattern in zip(self.outputs(processes, seconds), patterns, strict=True):
            self.assertEqual(found, code, out + err)
            self.assertRegex(err, r"^reshard-exec: error: [^\n]*" + pattern)
            self.assertEqual(err.count("\n"), 1, err)
            self.assertNotIn("bytes right", out)

    # Jobs that succeed.

    def assert_exact_in_any_order(self, url, environment=None):
        timeout = 20 if FULL else 30
        # Rank 0 gives up 2 s before its deadline, and a process needs some time to start.
        spread = timeout - 5 if FULL else 1
        delays = sorted((self.random.uniform(0, spread), rank) for rank in range(WORLD))
        begin, processes = time.monotonic(), []
        for delay, rank in delays:
            time.sleep(max(0, begin + delay - time.monotonic()))
            processes.append(self.start(rank, url, timeout=timeout, environment=environment))
        self.assert_exact(processes)

    def test_any_order_and_delay(self):
        # The second attempt finds the port and the files that the first has used a moment ago.
        for url in (f"tcp://127.0.0.1:{free_port()}", f"file://{self.new_folder()}"):
            for attempt in range(6 if FULL else 2):
                with self.subTest(url=url, attempt=attempt):
                    secret = {"RESHARD_SECRET": "a secret"} if attempt % 2 else None
                    self.assert_exact_in_any_order(url, secret)

    def test_variables_of_launchers(self):
        port = str(free_port())
        launchers = {
            "torchrun": lambda rank: {
                "RANK": rank,
                "WORLD_SIZE": "8",
                "MASTER_ADDR": "127.0.0.1",
                "RESHARD_PORT": port,
            },
            "torchrun, the port after MASTER_PORT": lambda rank: {
                "RANK": rank,
                "WORLD_SIZE": "8",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(int(port) - 1),
            },
            "mpirun": lambda rank: {
                "OMPI_COMM_WORLD_RANK": rank,
                "OMPI_COMM_WORLD_SIZE": "8",
                "RESHARD_PORT": port,
                "OMPI_MCA_orte_hnp_uri": "1.0;tcp://127.0.0.1,192.0.2.1:4567",
            },
            "srun, one host": lambda rank: {
                "SLURM_PROCID": rank,
                "SLURM_NTASKS": "8",
                "SLURM_NNODES": "1",
                "RESHARD_PORT": port,
            },
            "srun, a list of hosts": lambda rank: {
                "SLURM_PROCID": rank,
                "SLURM_NTASKS": "8",
                "SLURM_NNODES": "2",
                "SLURM_STEP_NODELIST": "localhost,other",
                "RESHARD_PORT": port,
            },
        }
        for name, variables in launchers.items():
            with self.subTest(name):
                self.assert_exact(
                    [self.start(None, "env://", environment=variables(str(rank))) for rank in range(WORLD)]
                )

    def test_only_env_urls_read_variables_of_launchers(self):
        """Beside a rank and a URL that the caller states, the variables of a launcher change nothing."""
        launcher = {
            "RANK": "7",
            "WORLD_SIZE": "9",
            "LOCAL_RANK": "7",
            "LOCAL_WORLD_SIZE": "9",
            "MASTER_ADDR": "192.0.2.1",
            "MASTER_PORT": "1",
            "RESHARD_PORT": "1",
            "OMPI_COMM_WORLD_RANK": "7",
            "OMPI_COMM_WORLD_SIZE": "9",
            "PMI_RANK": "7",
            "PMI_SIZE": "9",
            "SLURM_PROCID": "7",
            "SLURM_NTASKS": "9",
        }
        for url in (f"tcp://127.0.0.1:{free_port()}", f"file://{self.new_folder()}"):
            with self.subTest(url=url):
                self.assert_exact(self.start_all(url, environment=launcher))

    def test_files(self):
        """From safetensors to a DCP checkpoint and from that to safetensors: the processes read and check each byte
        once, and write the files of a single process."""
        at, url = self.new_folder(), f"file://{self.new_folder()}"
        all = 2 * (3 * (480 * 1024 + 1024) + 1024 * 1120)
        torchrun = {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port() - 1),
        }  # the port of torchrun's store; the rendezvous has the next one
        launches = {
            "file": [(rank, url, {}) for rank in (0, 1)],
            "env": [(None, "env://", torchrun | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"],
        }
        for source, format in (("in", "dcp"), ("dcp", "safetensors")):
            for world in (1, 2):
                (at / "job.yaml").write_text(FILES % (source, format, world))
                run(f"reshard-compile job.yaml -o plan-{world}", cwd=at)
            if source == "in":
                run("reshard-exec plan-1 --synthesize", f"--source={at / source}", cwd=at)
            run("reshard-exec plan-1", f"--source={at / source}", f"--target={at / format}", cwd=at)
            listings = [run(f"reshard-inspect plan-2 --rank={rank}", cwd=at).stdout for rank in (0, 1)]
            read = [sum(map(int, re.findall(r"<- source .*? (\d+) bytes: ", listing))) for listing in listings]
            self.assertEqual(sum(read), all)
            self.assertGreater(min(read), 0)
            for launch, processes in launches.items():
                with self.subTest(launch, format=format):
                    out = at / f"{format}-{launch}"
                    options = (f"--source={at / source}", f"--target={out}")
                    started = [
                        self.start(rank, place, *options, plan=at / "plan-2", environment=variables, synthesize=False)
                        for rank, place, variables in processes
                    ]
                    checked = []
                    for printed, error, code in self.outputs(started):
                        self.assertEqual((code, error), (0, ""), printed)
                        checked += map(int, re.findall(r"rank \d: (\d+) bytes right", printed))
                    self.assertEqual(len(checked), 2)
                    self.assertGreater(min(checked), 0)
                    self.assertEqual(sum(checked), all)
                    alone, found = (
                        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (at / format, out)
                    )
                    self.assertEqual(found, alone)

    def test_strangers(self):
        """Connections of other programs to the store while the processes join: they delay nobody."""
        greeting = b"RESHARDS" + (1).to_bytes(4, "little") + b"\0" + bytes(32)
        words = {
            "nothing": b"",
            "garbage": self.random.randbytes(5000),
            "another protocol": b"GET / HTTP/1.1\r\n\r\n",
            "half a greeting": greeting[:20],
            "half a message": greeting + (100).to_bytes(4, "little") + b"\2half",
            "a huge message": greeting + b"\xff" * 100,
        }
        for secret in (None, {"RESHARD_SECRET": "a secret"}):
            port = free_port()
            with self.subTest(secret=secret):
                url = f"tcp://127.0.0.1:{port}"
                processes = [self.start(rank, url, environment=secret, timeout=20) for rank in range(4)]
                wait_until(lambda: clients(port) >= 1, "rank 0 serves its store")
                for text in words.values():
                    stranger = socket.create_connection(("127.0.0.1", port))
                    self.addCleanup(stranger.close)
                    stranger.sendall(text)
                processes += [self.start(rank, url, environment=secret, timeout=20) for rank in range(4, WORLD)]
                self.assert_exact(processes)

    def test_a_crowd(self):
        """Silent connections to the store, always as many as the attacker has, some of them greeted: the job is done,
        or ends by its deadline, and rank 0 has descriptors left for UCX."""
        greeting = b"RESHARDS" + (1).to_bytes(4, "little") + b"\1" + bytes(32)
        for secret, crowd, complete in (
            ("a secret", 1100, True),
            (None, 1000, True),
            ("a secret", 600, False),
            (None, 2000, False),
        ):
            port = free_port()
            with self.subTest(secret=secret, crowd=crowd, complete=complete):
                options = {"environment": {"RESHARD_SECRET": secret} if secret else None, "timeout": 5}
                url = f"tcp://127.0.0.1:{port}"
                processes = [self.start(0, url, descriptors=512, **options | {"timeout": 20 if complete else 5})]
                wait_until(lambda: clients(port) >= 1, "rank 0 serves its store")
                strangers = []
                self.addCleanup(lambda them: [each.close() for each in them], strangers)
                for number in range(crowd):
                    try:
                        strangers.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                        strangers[-1].sendall(greeting if secret and number % 2 else b"")
                    except OSError:  # it has been closed already
                        pass
                processes += [
                    self.start(rank, url, **options | {"timeout": 20 if complete else 5})
                    for rank in range(1, WORLD - (not complete))
                ]
                if complete:
                    self.assert_exact(processes)
                else:
                    self.assert_failed(processes, len(processes) * ["rank 7 has not joined"], 5 + GRACE)
                for each in strangers:
                    each.close()

    # Processes that do not fit together.

    def test_a_wrong_secret(self):
        url = f"tcp://127.0.0.1:{free_port()}"
        secrets = {3: {"RESHARD_SECRET": "wrong"}, 5: {}}
        processes = [
            self.start(rank, url, environment=secrets.get(rank, {"RESHARD_SECRET": "right"}), timeout=4)
            for rank in range(WORLD)
        ]
        errors = {
            3: "the store at 127.0.0.1:\\d+ has another secret: give all processes the same secret",
            5: "the store at 127.0.0.1:\\d+ expects a secret, and this process has none",
        }
        missing = (
            "rank 3 has not joined; rank 5 has not joined; rank 0's store refused 2 clients that did not have "
            "its secret, the last from 127.0.0.1"
        )
        self.assert_failed(processes, [errors.get(rank, missing) for rank in range(WORLD)], 4 + GRACE)

    def test_a_wrong_secret_in_a_folder(self):
        url = f"file://{self.new_folder()}"
        processes = [
            self.start(rank, url, environment={"RESHARD_SECRET": "wrong" if rank == 3 else "right"}, timeout=4)
            for rank in range(WORLD)
        ]
        errors = WORLD * ["the hello of rank 3 \\(process \\d+ on host [^ ]+\\) .*give all processes the same secret"]
        errors[3] = "the welcome of rank 0 .*give all processes the same secret"
        self.assert_failed(processes, errors, 4 + GRACE)

    def test_another_plan(self):
        """It ends all processes at once, also without a deadline."""
        jobs = {
            (url, other): [
                self.start(rank, url, plan=self.other if rank == other else self.plan, timeout=None)
                for rank in range(WORLD)
            ]
            for other in (3, 0)
            for url in (f"tcp://127.0.0.1:{free_port()}", f"file://{self.new_folder()}")
        }
        error = r"rank %s has opened plan [0-9a-f]{32}, rank 0 has opened plan [0-9a-f]{32}; give the same plan file"
        for (url, other), processes in jobs.items():
            with self.subTest(url=url, other=other):
                self.assert_failed(processes, WORLD * [error % (other or "[1-7]")], GRACE)

    def test_a_rank_that_fails_before_it_joins(self):
        """Its plan is missing or damaged, or an option is: it ends all processes at once, also without a deadline."""
        damaged = self.folder / "damaged"
        damaged.write_bytes(self.plan.read_bytes()[:1000])
        jobs = []
        for failing, reason in (
            (3, {"plan": self.folder / "none"}),
            (0, {"plan": damaged}),
            (5, {"synthesize": False}),
        ):
            for url in (f"tcp://127.0.0.1:{free_port()}", f"file://{self.new_folder()}"):
                if url.startswith("file"):  # hellos of an earlier attempt
                    self.assert_exact(self.start_all(url))
                processes = [
                    self.start(rank, url, timeout=None, **(reason if rank == failing else {})) for rank in range(WORLD)
                ]
                jobs.append((failing, reason, url, processes))
        for failing, reason, url, processes in jobs:
            with self.subTest(url=url, failing=failing):
                error = re.escape(f"'{reason['plan']}'") if "plan" in reason else "the job names no folder for its "
                self.assert_failed([processes[failing]], [error], GRACE, code=2)
                self.assert_failed(
                    [each for each in processes if each != processes[failing]],
                    (WORLD - 1) * [f"rank {failing}: .*{error}"],
                    GRACE,
                )

    def test_no_rank_has_the_plan(self):
        url = f"tcp://127.0.0.1:{free_port()}"
        none = self.folder / "none"
        processes = [self.start(rank, url, plan=none, timeout=None) for rank in range(WORLD)]
        self.assert_failed(processes, WORLD * [re.escape(f"'{none}'")], GRACE, code=2)

    def test_a_duplicate_rank(self):
        url = f"tcp://127.0.0.1:{free_port()}"
        processes = [self.start(rank, url) for rank in (0, 1, 2)]
        time.sleep(0.5)
        processes.append(self.start(2, url))
        self.assert_failed(processes, 4 * [TWICE])

    def test_nine_processes(self):
        at = self.new_folder()
        processes = [self.start(rank, f"file://{at}") for rank in range(WORLD - 1)]
        wait_until(lambda: len(list(at.glob("*%2fhello%2f*"))) == WORLD - 1, "7 processes have said hello")
        processes.append(self.start(2, f"file://{at}"))
        wait_until(lambda: list(at.glob("*%2fconflict%2f2")), "two processes have joined as rank 2")
        # Rank 7 may join after the others have failed. It then reads their reason in the folder.
        processes.append(self.start(7, f"file://{at}", timeout=3))
        self.assert_failed(processes, 9 * [TWICE], 3 + GRACE)

    # A store that is lost, or never existed.

    def test_the_port_is_in_use(self):
        """All processes end at once, also without a deadline, and nearly all with rank 0's reason."""
        jobs = []
        for banner, error in (
            (BANNER, "%s is served by another program, expected rank 0 of this job"),
            (b"", None),
            (None, None),
        ):
            other = Server(banner)
            self.addCleanup(other.close)
            where = f"127.0.0.1:{other.port}"
            zero = f"rank 0 cannot serve the store at {where}: another process uses the port; choose another port"
            errors = [zero, *(WORLD - 1) * [error % where if error else zero]]
            jobs.append((banner, self.start_all(f"tcp://{where}", timeout=None), errors))
        for banner, processes, errors in jobs:
            with self.subTest(banner=banner):
                self.assert_failed(processes, errors, GRACE)

    def test_another_job_has_the_port(self):
        """Its store lets the processes of the second job in. The first job is not disturbed."""
        for secret in (None, {"RESHARD_SECRET": "a secret"}):
            with self.subTest(secret=secret):
                port = free_port()
                url = f"tcp://127.0.0.1:{port}"
                first = [self.start(rank, url, environment=secret) for rank in range(WORLD - 1)]
                wait_until(lambda: clients(port) == WORLD - 1, "7 processes have joined")
                second = [
                    self.start(rank, url, "--job=second", environment=secret, timeout=None) for rank in range(WORLD)
                ]
                self.assert_failed(second, WORLD * [f"rank 0 cannot serve the store at 127.0.0.1:{port}: "], GRACE)
                self.assert_exact([*first, self.start(WORLD - 1, url, environment=secret)])

    def test_rank_zero_ends_before_all_have_joined(self):
        port = free_port()
        url = f"tcp://127.0.0.1:{port}"
        processes = [self.start(rank, url) for rank in (0, 1, 2)]
        wait_until(lambda: clients(port) == 3, "3 processes have joined")
        time.sleep(0.5)  # they have greeted
        processes[0].kill()
        processes[0].wait()
        late = self.start(3, url, timeout=2)
        self.assert_failed(processes[1:], 2 * [f"lost the store at 127.0.0.1:{port}: .*rank 0 may have ended"], GRACE)
        self.assert_failed(
            [late], [f"timed out: cannot connect to the store at 127.0.0.1:{port}: .*rank 0 of the job"], 2 + GRACE
        )

    def test_the_folder_is_removed(self):
        at = self.new_folder()
        processes = [self.start(rank, f"file://{at}", timeout=20) for rank in (0, 1, 2)]
        wait_until(lambda: len(list(at.glob("*%2fhello%2f*"))) == 3, "3 processes have said hello")
        while at.exists():
            shutil.rmtree(at, ignore_errors=True)  # a process may write a file there in the meantime
        # A rank may be about to read the hellos or to write its answer.
        self.assert_failed(processes, 3 * [f"'{at}/[^']*(hello|answer)[^']*': No such file or directory"], GRACE)
        late = self.start(3, f"file://{at}", timeout=2)  # it makes the folder again, in which a slow rank would wait
        self.assert_failed([late], ["timed out: rank 0 has not joined"], 2 + GRACE)

    # Wrong usage.

    def test_bad_urls(self):
        for url, code, error in (
            ("udp://a:1", 2, "rendezvous 'udp://a:1': found the scheme 'udp', expected tcp://host:port"),
            ("127.0.0.1:1", 2, "rendezvous '127.0.0.1:1': found no scheme, expected tcp://host:port"),
            ("file://a", 2, "rendezvous 'file://a': found a relative path, expected tcp://host:port"),
            ("tcp://a", 2, "rendezvous 'tcp://a': found 'a', expected host:port"),
            ("tcp://a:99999", 2, "rendezvous 'tcp://a:99999': found 'a:99999', expected .* a port of 1 to 65535"),
            ("file:///no/such", 2, "cannot make the folder '/no/such': No such file or directory; expected a folder"),
            ("file:///etc/passwd", 2, "'/etc/passwd' is not a folder, expected a folder that all processes"),
            ("tcp://no-such-host.invalid:1", 3, "host 'no-such-host.invalid'"),
            ("tcp://192.0.2.1:1", 2, "the store at 192.0.2.1:1 needs a secret, since other machines can reach"),
        ):
            for rank in (0, 1):
                with self.subTest(url=url, rank=rank):
                    self.assert_failed([self.start(rank, url, timeout=4)], [error], 4 + GRACE, code)

    def test_an_unreachable_host(self):
        processes = [self.start(rank, "tcp://192.0.2.1:1", "--insecure", timeout=2) for rank in range(WORLD)]
        # The network may refuse a connection to this address, which is of no machine, or give no answer.
        errors = ["rank 0 cannot serve the store at 192.0.2.1:1: it is no address of this machine"]
        self.assert_failed(processes, errors + (WORLD - 1) * ["the store at 192.0.2.1:1"], 2 + GRACE)

    def test_bad_ranks(self):
        url = f"tcp://127.0.0.1:{free_port()}"
        torchrun = {"RANK": "8", "WORLD_SIZE": "9", "MASTER_ADDR": "127.0.0.1", "RESHARD_PORT": "1"}
        for rank, at, variables, code, error in (
            (8, url, {}, 2, "rank 8 is not in the plan, which has 8 ranks"),
            (-1, url, {}, 2, "option '--rank': found '-1', expected a number"),
            ("x", url, {}, 2, "option '--rank': found 'x', expected a number"),
            (None, url, {}, 2, "--rank is missing, expected --rank=R with R from 0 to 7, another one in each process"),
            (1, None, {}, 2, "--rendezvous is missing, expected --rendezvous=URL with --transport=ucx"),
            (None, "env://", {}, 2, "rendezvous 'env://': found no variable of a launcher, expected RANK"),
            (None, "env://", {"RANK": "1"}, 2, "rendezvous 'env://': found RANK=1, expected WORLD_SIZE"),
            (None, "env://", torchrun, 2, "the launch has 9 processes, expected 8, one for each rank of the plan"),
        ):
            with self.subTest(rank=rank, at=at, variables=variables):
                self.assert_failed([self.start(rank, at, environment=variables, timeout=4)], [error], 4 + GRACE, code)

    # A rank that is lost during a run.

    def assert_lost(self, number, victim):
        """All other processes end by their deadline with an error that names a rank: the victim, if it is killed. If it
        is stopped, no process knows that it is lost, and their deadlines pass one after the other: each chain of these
        names ends at the victim."""
        at, timeout = self.new_folder(), 3
        processes = self.start_all(f"file://{at}", "--repeat=1000000", timeout=timeout, check=False)
        wait_until(lambda: list(at.glob("*%2froster")), "all have joined")
        time.sleep(1)
        self.assertEqual([process.poll() for process in processes], WORLD * [None])
        processes[victim].send_signal(number)
        named = {}
        others = [rank for rank in range(WORLD) if rank != victim]
        for rank, (out, err, code) in zip(others, self.outputs([processes[each] for each in others], timeout + GRACE)):
            self.assertEqual(code, 3, out + err)
            found = re.fullmatch(r"reshard-exec: error: [^\n]*?\brank (\d)\b[^\n]*\n", err)
            self.assertTrue(found, err)
            named[rank] = int(found[1])
        for rank in others:
            if number == signal.SIGKILL:
                self.assertEqual(named[rank], victim, named)
            chain = [rank]
            while chain[-1] != victim and len(chain) <= WORLD:
                chain.append(named[chain[-1]])
            self.assertEqual(chain[-1], victim, named)
        processes[victim].kill()
        processes[victim].wait()
        self.assert_exact(self.start_all(f"file://{at}"))  # the files of the failed job do no harm

    def test_a_killed_rank_without_a_deadline(self):
        """The rank is stopped first, so that it is killed while others wait for it: those that copy out of its memory
        or its slots, those whose slots it has not read, and with messages alone those that receive from it."""
        for options in ((), ("--private-memory",), ("--no-local-shortcut",)):
            for victim in range(WORLD) if FULL else (2,):
                with self.subTest(options=options, victim=victim):
                    at = self.new_folder()
                    processes = self.start_all(f"file://{at}", "--repeat=1000000", *options, timeout=None, check=False)
                    wait_until(lambda: list(at.glob("*%2froster")), "all have joined")
                    time.sleep(1)
                    processes[victim].send_signal(signal.SIGSTOP)
                    time.sleep(3)  # a stopped rank is not lost
                    self.assertEqual([process.poll() for process in processes], WORLD * [None])
                    processes[victim].kill()
                    others = [process for process in processes if process != processes[victim]]
                    lost = f"the (connection to rank {victim} is lost: |memory of rank {victim} cannot be read; )"
                    self.assert_failed(others, len(others) * [lost], GRACE)

    def test_a_killed_rank(self):
        for victim in range(WORLD) if FULL else (5,):
            with self.subTest(victim=victim):
                self.assert_lost(signal.SIGKILL, victim)

    def test_a_stopped_rank(self):
        for victim in range(WORLD) if FULL else (0,):
            with self.subTest(victim=victim):
                self.assert_lost(signal.SIGSTOP, victim)


if __name__ == "__main__":
    unittest.main()

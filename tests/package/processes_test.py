# SPDX-License-Identifier: Apache-2.0
"""Tests of the installed Python module: signals during calls, forked processes, hooks that call their executor, and the
check of a rendezvous. package_test.py runs this."""

import contextlib
import multiprocessing.pool
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path
from unittest import mock

import numpy as np

import reshard
from reshard import compiler
from reshard.agreement import Agreement

UCX = (reshard.PREFIX / "lib" / "libreshard_ucx.so").exists()
MPI = (reshard.PREFIX / "lib" / "libreshard_mpi.so").exists() and shutil.which("mpirun")

#: A refit of two ranks, with every kind of hook.
JOB = """version: 1
model:
  dtype: fp32
  tensors: {w: [4, 2], v: [4]}
  layouts:
    train: {params: same}
    serve: {params: {w: {holds: w, refresh: fold}, v: {holds: v, transform: pack}}}
source: {layout: train, mesh: {}, ranks: [0]}
target: {layout: serve, mesh: {}, ranks: [1]}
"""

POOL = """version: 1
model: {dtype: fp32, tensors: {w: [4, 2], v: [4]}}
source: {mesh: {}}
target: {mesh: {}, replicas: 2}
"""


def compiled(text):
    Path("job.yaml").write_text(text)
    return reshard.compile("job.yaml")


def bind(executor, fold=lambda rank: None, pack=lambda param: None):
    """Binds the params of the executor's ranks; returns them by rank."""
    bound = {}
    for rank in executor.ranks:
        bound[rank] = {
            name: np.full(param.shape, rank + 1, np.float32)
            for name, param in executor.plan.params(rank).items()
            if not param.transform
        }
        executor.bind(bound[rank], rank=rank)
    if 1 in executor.ranks:
        executor.set_hook("fold", fold)
        executor.set_transform("pack", finalize=pack)
    return bound


class Store(dict):
    """A store of the caller."""

    set = dict.__setitem__


class Interrupted(Exception):
    """Raised by a handler."""


@contextlib.contextmanager
def signaled(number=signal.SIGINT, after=0.3):
    """Sends this process a signal. Yields a list, to which the time of the signal is appended."""
    sent = []

    def send():
        time.sleep(after)
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield sent
    finally:
        thread.join()


class Signals(unittest.TestCase):
    """A signal ends a call that waits. Each test waits for a peer that does not come, without a deadline."""

    def setUp(self):
        self.folder = tempfile.mkdtemp(dir=".")
        self.url = f"file://{Path(self.folder).resolve()}"

    def interrupted(self, call, raised=KeyboardInterrupt, number=signal.SIGINT):
        """The signal is handled within 0.2 s (0.5 s: machines are busy), and the call raises what the handler raises.
        After a run or digest that failed it first frees what it has of UCX, which takes a second."""
        seen = []

        def handler(*_):
            seen.append(time.monotonic())
            raise raised

        before = signal.signal(number, handler)
        try:
            with signaled(number) as sent:
                with self.assertRaises(raised):
                    call()
                    time.sleep(8)
                self.assertLess(seen[0] - sent[0], 0.5)
                self.assertLess(time.monotonic() - sent[0], 4)
        finally:
            signal.signal(number, before)

    def pair(self, plan):
        """Two executors, of ranks 0 and 1, of this process."""
        with multiprocessing.pool.ThreadPool(2) as pool:
            return pool.map(
                lambda rank: reshard.Executor(plan, rank, transport="ucx", rendezvous=self.url, join_timeout=30),
                range(2),
            )

    @unittest.skipUnless(UCX, "libreshard_ucx.so is not installed")
    def test_open(self):
        plan = compiled(JOB)
        for rank in 0, 1:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            for rendezvous in self.url, Store(), f"tcp://127.0.0.1:{port}":
                with self.subTest(rank=rank, rendezvous=rendezvous):
                    self.interrupted(lambda: reshard.Executor(plan, rank, transport="ucx", rendezvous=rendezvous))

    @unittest.skipUnless(UCX, "libreshard_ucx.so is not installed")
    def test_calls(self):
        plan = compiled(JOB)
        calls = {
            "prepare": lambda executor: executor.prepare(),
            "run": lambda executor: executor.run(),
            "checked run": lambda executor: executor.run(check=True, allow_undigested=True),
            "digest": lambda executor: executor.digest("source"),
            "all_reduce_min": lambda executor: executor.all_reduce_min(1),
            "replace": lambda executor: executor.replace(plan),
        }
        for name, call in calls.items():
            with self.subTest(name):
                self.url = f"file://{Path(tempfile.mkdtemp(dir='.')).resolve()}"
                first, second = self.pair(plan)
                for executor in first, second:
                    bind(executor)
                if name != "prepare":
                    with multiprocessing.pool.ThreadPool(2) as pool:
                        pool.map(reshard.Executor.prepare, (first, second))
                self.interrupted(lambda: call(second))
                second.close()
                first.close()

    @unittest.skipUnless(UCX, "libreshard_ucx.so is not installed")
    def test_pull(self):
        executor = reshard.Executor(compiled(POOL), 1, transport="ucx", rendezvous=self.url, pull=True)
        bind_all = {name: np.zeros(param.shape, np.float32) for name, param in executor.plan.params(1).items()}
        executor.bind(bind_all)
        executor.prepare()
        self.interrupted(executor.pull)
        self.interrupted(executor.pull)  # the next one continues
        self.interrupted(executor.replicas)
        self.assertEqual(executor.state, "empty")
        executor.close()

    @unittest.skipUnless(UCX, "libreshard_ucx.so is not installed")
    def test_other_signals(self):
        """A handler that raises ends the call with its exception; one that returns does not end it."""

        def open_first(timeout):
            reshard.Executor(compiled(JOB), 0, transport="ucx", rendezvous=self.url, join_timeout=timeout)

        self.interrupted(lambda: open_first(None), Interrupted, signal.SIGUSR1)
        seen = []
        before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(time.monotonic()))
        try:
            with signaled(signal.SIGUSR1), self.assertRaises(reshard.TimeoutError):
                open_first(1.5)
            ended = time.monotonic()
        finally:
            signal.signal(signal.SIGUSR1, before)
        self.assertEqual(len(seen), 1)
        self.assertGreater(ended - seen[0], 0.3)  # it was handled during the call

    @unittest.skipUnless(UCX, "libreshard_ucx.so is not installed")
    def test_a_slow_store(self):
        """Each call takes longer than the deadline, and none looks for signals."""

        class Slow(dict):
            def set(self, key, value):
                time.sleep(20)

            def get(self, key):
                time.sleep(20)

        begun = time.monotonic()
        with self.assertRaises(reshard.TimeoutError) as raised:
            reshard.Executor(compiled(JOB), 0, transport="ucx", rendezvous=Slow(), join_timeout=1)
        self.assertLess(time.monotonic() - begun, 5)
        self.assertRegex(
            str(raised.exception.__cause__), r"store: [gs]et\('reshard/.*'\) has not returned at the deadline"
        )

    def test_compile(self):
        (Path(self.folder) / "bin").mkdir()
        command = Path(self.folder) / "bin" / "reshard-compile"
        command.write_text("#!/bin/sh\nexec sleep 20\n")
        command.chmod(0o755)
        with mock.patch.object(compiler, "PREFIX", Path(self.folder)):
            self.interrupted(lambda: reshard.compile("job.yaml"))

    def test_agreement(self):
        class Store:
            def wait(self, keys, timeout):
                done = threading.Event()
                threading.Thread(target=lambda: (time.sleep(20), done.set()), daemon=True).start()
                while not done.is_set():  # as a store of torch.distributed, which does not look for signals
                    with contextlib.suppress(KeyboardInterrupt):
                        done.wait()

        self.interrupted(lambda: Agreement(Store(), 0, 2)({}, lambda all: {}, 20))


class Hooks(unittest.TestCase):
    def executor(self, **hooks):
        executor = reshard.Executor(compiled(JOB))
        bound = bind(executor, **hooks)
        executor.prepare()
        return executor, bound

    def test_calls_in_a_hook_are_errors(self):
        errors = []

        def calls(_):
            self.assertEqual(executor.state, "torn")  # properties may be read
            for call in (
                executor.close,
                executor.run,
                executor.prepare,
                lambda: executor.replace(executor.plan),
                lambda: executor.all_reduce_min(1),
            ):
                with self.assertRaises(reshard.Error) as raised:
                    call()
                errors.append(str(raised.exception))

        for hook in "fold", "pack":
            executor, _ = self.executor(**{hook: calls})
            errors.clear()
            executor.run()
            self.assertEqual(
                [each.split(" ")[0] for each in errors], ["close", "run", "prepare", "replace", "all_reduce_min"]
            )
            self.assertEqual(
                errors[0],
                "close during run of the same executor: a hook must not call its executor; call close after run",
            )
            self.assertEqual(executor.state, "complete")
            executor.close()

    def test_calls_in_a_hook_of_on_landed(self):
        executor = reshard.Executor(compiled(JOB))
        source = {name: np.ones(param.shape, np.float32) for name, param in executor.plan.params(0).items()}
        executor.bind(source, rank=0)
        executor.allocate("w", rank=1)
        executor.set_hook("fold", lambda rank: None)
        executor.set_transform("pack", finalize=lambda param: None)
        executor.prepare()
        executor.on_landed("*", lambda landed: executor.close())
        self.assertRaisesRegex(reshard.RunError, "close during run of the same executor", executor.run)
        self.assertEqual(executor.state, "torn")

    def test_what_ends_a_program_stays(self):
        for raises in KeyboardInterrupt, SystemExit:

            def hook(_):
                raise raises

            for name in "fold", "pack":
                executor, _ = self.executor(**{name: hook})
                with self.assertRaises(raises) as raised:
                    executor.run()
                self.assertIsInstance(raised.exception.__cause__, reshard.RunError)
                self.assertEqual(executor.state, "torn")
                executor.close()
        executor, _ = self.executor(fold=lambda rank: 1 / 0)
        with self.assertRaises(reshard.RunError) as raised:
            executor.run()
        self.assertIsInstance(raised.exception.__cause__, ZeroDivisionError)

    def test_a_signal_before_the_first_step_of_a_hook(self):
        """The handler raises in the function that the library calls, before its `try`: the hook has not run."""
        calls = []
        executor, _ = self.executor(fold=calls.append, pack=lambda param: signal.raise_signal(signal.SIGINT))
        self.assertRaises(KeyboardInterrupt, executor.run)
        self.assertEqual((executor.state, calls), ("torn", []))
        executor.close()

    def test_a_lost_exception_of_a_hook(self):
        executor, _ = self.executor()
        with self.assertRaises(KeyboardInterrupt):
            with executor._in("run"):
                # as ctypes calls it
                sys.unraisablehook(mock.Mock(object=reshard.Executor.run, exc_value=KeyboardInterrupt()))
            executor._check(0)
        executor.run()
        self.assertEqual(executor.state, "complete")


#: One rank of a refit that forks: children use the executor, or end in all ways; then it runs again.
FORKS = """
import os, sys, time, multiprocessing
sys.path[:0] = [{path!r}]
import reshard
from processes_test import bind

def refused(executor):
    for call in (executor.run, executor.prepare, lambda: executor.digest("source"), lambda: executor.all_reduce_min(1),
                 lambda: executor.replace(executor.plan), lambda: executor.state, lambda: executor.version,
                 lambda: executor.ranks, lambda: executor.nbytes, lambda: executor.bind({{}})):
        try:
            call()
        except reshard.Error as error:
            assert "opened the executor, and this is process" in str(error), error
        else:
            raise AssertionError("a call of a forked process succeeded")
    transport = sys.argv[1]
    if transport != "threads":
        try:
            reshard.Executor(executor.plan, 0, transport=transport,
                             rendezvous=sys.argv[3] if transport == "ucx" else None, join_timeout=5)
        except reshard.Error as error:
            assert "was forked" in str(error), error
        else:
            raise AssertionError("opened")
    own = reshard.Executor(executor.plan)
    bind(own)
    own.prepare()
    own.run()
    executor.close()
    executor.close()

def child(executor, how):
    refused(executor)
    if how == "_exit":
        os._exit(0)
    if how == "exit":
        sys.exit(0)

def main():
    transport, rank = sys.argv[1], None if sys.argv[2] == "all" else int(sys.argv[2])
    executor = reshard.Executor("plan.rplan", rank, transport=transport,
                                rendezvous=sys.argv[3] if transport == "ucx" else None, join_timeout=60)
    bound = bind(executor)
    executor.prepare()
    executor.run(timeout=60)
    for how in "_exit", "exit", "end":
        process = os.fork()
        if process == 0:
            child(executor, how)
            return
        assert os.waitpid(process, 0)[1] == 0, how
        executor.run(timeout=60)
    process = multiprocessing.get_context("fork").Process(target=child, args=(executor, "end"))
    process.start()
    process.join()
    assert process.exitcode == 0, process.exitcode
    executor.run(timeout=60)
    assert executor.version == 5
    if 1 in executor.ranks:
        assert (bound[1]["w"] == 1).all()
    executor.close()
    if transport == "threads":  # the folder of a compiled plan stays when a forked process ends
        plan = reshard.compile("job.yaml")
        if os.fork() == 0:
            return
        os.wait()
        assert os.path.exists(plan.path)
    print("right")

main()
"""


class Forks(unittest.TestCase):
    def setUp(self):
        Path("job.yaml").write_text(JOB)
        reshard.compile("job.yaml", output="plan.rplan")
        Path("forks.py").write_text(FORKS.format(path=str(Path(__file__).parent)))

    def ended(self, *processes):
        for process in processes:
            output, errors = process.communicate(timeout=120)
            self.assertEqual((process.returncode, errors), (0, ""), output)
            yield output

    def start(self, *command):
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def test_threads(self):
        self.assertEqual([*self.ended(self.start(sys.executable, "forks.py", "threads", "all"))], ["right\n"])

    @unittest.skipUnless(UCX, "libreshard_ucx.so is not installed")
    def test_ucx(self):
        url = f"file://{Path(tempfile.mkdtemp(dir='.')).resolve()}"
        processes = [self.start(sys.executable, "forks.py", "ucx", str(rank), url) for rank in range(2)]
        self.assertEqual([*self.ended(*processes)], ["right\n"] * 2)

    @unittest.skipUnless(MPI, "mpirun or libreshard_mpi.so is not installed")
    def test_mpi(self):
        process = self.start(
            "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "forks.py", "mpi", "all"
        )
        output, errors = process.communicate(timeout=120)
        self.assertEqual((process.returncode, output), (0, "right\n" * 2), errors)


class Checks(unittest.TestCase):
    """A rendezvous is checked before something else is started."""

    def test_arguments(self):
        url = f"file://{Path.cwd()}"
        for place, options, text in (
            ("flie:///a", {}, "rendezvous 'flie:///a': found the scheme 'flie', expected tcp://host:port"),
            (f"{url}/none/store", {}, "cannot make the folder"),
            ("tcp://127.0.0.1:x", {}, "found '127.0.0.1:x', expected host:port"),
            ("env://", {}, "found no variable of a launcher"),
            ("é" * 10000, {}, "^rendezvous 'éé"),  # a text that is cut
            ({}, {}, "rendezvous: found dict, expected a text"),
            ("tcp://192.0.2.1:1", {}, "needs a secret"),
            (url, {"transport": "uxc"}, "unknown transport 'uxc'"),
            (url, {"transport": "mpi"}, "transport 'mpi' has no rendezvous"),
            (url, {"device": "gpu"}, "unknown device 'gpu'"),
            (url, {"join_timeout": 0}, "found 0 seconds"),
            (url, {"secret": ""}, "secret: found an empty text"),
        ):
            with self.subTest(place=place, options=options), self.assertRaisesRegex(reshard.Error, text):
                reshard.check_rendezvous(place, **options)
        reshard.check_rendezvous(url, join_timeout=5)
        reshard.check_rendezvous("tcp://192.0.2.1:1", insecure=True)
        reshard.check_rendezvous("tcp://192.0.2.1:1", secret="a secret")


if __name__ == "__main__":
    unittest.main()

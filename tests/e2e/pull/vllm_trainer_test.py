# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of a refit of vLLM, without vLLM: an engine is a process that answers the calls of a client.
tests/engines runs the same with real engines."""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import unittest
import unittest.mock

from commands import BIN, run, shared_folder
from launchers import environment
from module import importable

JOB = """version: 1
model: {dtype: fp32, tensors: {a: [64, 8], b: [8]}}
source: {mesh: {}}
target: {mesh: {}, ranks: [1]%s}
"""
ENGINE = """
import json, sys
import numpy, reshard

executor = None
for line in sys.stdin:
    call, info = json.loads(line)
    try:
        if call == "init_weight_transfer_engine":
            options = {name: info[name] for name in ("transport", "rendezvous", "pull")}
            executor = reshard.Executor(info["plan"], 1, join_timeout=info["timeout"], **options)
            held = {name: numpy.zeros(param.shape, numpy.float32) for name, param in executor.plan.params(1).items()}
            executor.bind(held)
            executor.prepare()
        elif call == "update_weights" and "min_version" in info:
            check = {name: info[name] for name in ("check", "allow_undigested")}
            executor.pull(info["min_version"], info["timeout"], **check)
        elif call == "update_weights":
            executor.run(timeout=info["timeout"], check=info["check"], allow_undigested=info["allow_undigested"])
        values = {name: sorted({*array.ravel().tolist()}) for name, array in held.items()}
        print(json.dumps({"values": values}), flush=True)
    except reshard.Error as error:
        print(json.dumps({"error": str(error)}), flush=True)
"""


class Engine:
    """A process that serves as an engine, and its client."""

    def __init__(self, case):
        self.process = subprocess.Popen(
            [sys.executable, case.folder / "engine.py"],
            env=case.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        case.addCleanup(self.process.communicate)
        case.addCleanup(self.process.kill)
        self.values = {}
        self.refuses, self.finished = "", False

    def _call(self, *words):
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline() or '{"error": "the engine has ended"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        self.values = answer["values"]

    def init_weight_transfer_engine(self, init_info):
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self):
        if self.refuses:
            raise RuntimeError(self.refuses)

    def update_weights(self, update_info):
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version=None):
        self.finished = True


class Tensor:
    """What a trainer uses of PyTorch's."""

    def __init__(self, array):
        self.array = array

    def detach(self):
        return self.array


@unittest.skipUnless((BIN / "libreshard_ucx.so").exists(), "transport ucx was not built")
class TrainerTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = shared_folder(cls)
        cls.environment = environment(cls.folder)
        importable(cls.folder)
        (cls.folder / "engine.py").write_text(ENGINE)
        for name, replicas in (("run", ""), ("pull", ", replicas: 1")):
            (cls.folder / f"{name}.yaml").write_text(JOB % replicas)
            run("reshard-compile", cls.folder / f"{name}.yaml", "-o", cls.folder / f"{name}.rplan")

    def setUp(self):
        import numpy

        self.weights = {"a": Tensor(numpy.zeros((64, 8), numpy.float32)), "b": Tensor(numpy.zeros(8, numpy.float32))}

    def trainer(self, client, mode="run", **more):
        from reshard.integrations.vllm_trainer import Trainer

        url = "file://" + tempfile.mkdtemp(dir=self.folder)
        trainer = Trainer(
            str(self.folder / f"{mode}.rplan"),
            self.weights,
            client,
            rank=0,
            rendezvous=url,
            timeout=60,
            pull=mode == "pull",
            **more,
        )
        self.addCleanup(client.process.kill)
        self.addCleanup(trainer.close)
        return trainer

    def step(self, value):
        for tensor in self.weights.values():
            tensor.array[...] = value

    def test_refits(self):
        engine = Engine(self)
        trainer = self.trainer(engine)
        for number in (1, 2, 3):
            self.step(number)
            self.assertEqual(trainer.refit(), number)
            self.assertEqual(engine.values, {"a": [number], "b": [number]})
            self.assertTrue(engine.finished)

    def test_checked_refits(self):
        """With transport `ucx`, and in pull mode, where the engine reads weights that differ from
        those that were published."""
        for mode in ("run", "pull"):
            with self.subTest(mode):
                engine = Engine(self)
                trainer = self.trainer(engine, mode)
                self.step(1)
                self.assertEqual(trainer.refit(check=True), 1)
                self.assertEqual(engine.values, {"a": [1], "b": [1]})
        update = engine.update_weights

        def late(info):
            self.weights["b"].array[3] = 7
            update(info)

        engine.update_weights = late
        self.step(2)
        self.assertRaisesRegex(
            RuntimeError,
            "the memory of replica 0 rank 0 .* differs from version 2 of the source: wrong are the tensors 'b'",
            trainer.refit,
            check=True,
        )
        engine.update_weights = update
        self.step(3)
        self.assertEqual(trainer.refit(check=True), 3)
        self.assertEqual(engine.values, {"a": [3], "b": [3]})

    def test_a_trainer_that_waits_says_so(self):
        """Long before its deadline, a trainer whose engine does not join says for what it waits."""
        from reshard.integrations import _engine
        from reshard.integrations.vllm_trainer import Trainer

        store, said = tempfile.mkdtemp(dir=self.folder), io.StringIO()
        with (
            unittest.mock.patch.object(_engine, "REPORT_SECONDS", 0.2),
            contextlib.redirect_stderr(said),
            self.assertRaises(TimeoutError),
        ):
            Trainer(str(self.folder / "run.rplan"), self.weights, None, rank=0, rendezvous=f"file://{store}", timeout=2)
        lines = said.getvalue().splitlines()
        self.assertRegex(
            lines[0],
            r"^reshard: trainer rank 0 has waited \d+ s for the other trainer ranks and the "
            rf"engine's workers at file://{store}$",
        )
        self.assertIn(len(lines), range(2, 15))

    def test_a_trainer_that_cannot_join(self):
        """Its own error ends it at once: before the engine is told, if its arguments are wrong or the plan does not
        fit, and not at the engine's deadline."""
        import reshard
        from reshard.integrations import vllm_trainer

        told, ends = [], threading.Event()

        class Waiting:
            def init_weight_transfer_engine(self, info):
                told.append(info)
                ends.wait(60)

        self.addCleanup(ends.set)
        busy = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(busy.close)
        store, port = "file://" + tempfile.mkdtemp(dir=self.folder), busy.getsockname()[1]
        for plan, weights, url, text, expected in (
            ("none", self.weights, store, "none.rplan", 0),
            ("run", {"a": self.weights["a"]}, store, "'b': the plan has it, but not the module", 0),
            ("none", self.weights, "file:///none/store", "cannot make the folder '/none/store'", 0),
            ("none", self.weights, "flie:///tmp", "found the scheme 'flie', expected tcp://host:port", 0),
            ("none", self.weights, "tcp://127.0.0.1:", "found '127.0.0.1:', expected host:port", 0),
            ("run", self.weights, f"tcp://127.0.0.1:{port}", "another process uses the port", 1),
        ):
            begin = time.monotonic()
            with (
                unittest.mock.patch.object(vllm_trainer, "_CAUSE_SECONDS", 0.5),
                self.assertRaisesRegex(reshard.Error, text),
            ):
                vllm_trainer.Trainer(
                    str(self.folder / f"{plan}.rplan"), weights, Waiting(), rank=0, rendezvous=url, timeout=50
                )
            self.assertLess(time.monotonic() - begin, 20)
            self.assertEqual(len(told), expected)
        for option, value in (("transport", "uxc"), ("device", "gpu"), ("timeout", 0)):
            with self.assertRaisesRegex(reshard.Error, option):
                vllm_trainer.Trainer(
                    str(self.folder / "run.rplan"), self.weights, Waiting(), rank=0, rendezvous=store, **{option: value}
                )
        self.assertEqual(len(told), 1)

    def test_members_with_a_wrong_rendezvous(self):
        """Those of other frameworks refuse it too: a CheckpointSide before its framework connects its processes."""
        import reshard
        from reshard.integrations import _engine

        package = "nemo_rl.utils.checkpoint_engines.base"
        base = types.SimpleNamespace(CheckpointEngine=object)
        names = [package.rsplit(".", parts)[0] for parts in range(4)]
        with unittest.mock.patch.dict(sys.modules, dict.fromkeys(names, base)):
            from reshard.integrations import nemo_rl

        for url, text in (
            ("file:///none/store", "cannot make the folder '/none/store'"),
            ("flie:///tmp", "found the scheme 'flie', expected tcp://host:port"),
        ):
            for make in (
                lambda url: _engine.Member("none.rplan", 0, {}, rendezvous=url),
                lambda url: _engine.CheckpointSide("none.rplan", rendezvous=url),
                lambda url: nemo_rl.Engine(plan="none.rplan", rendezvous=url),
            ):
                self.assertRaisesRegex(reshard.Error, text, make, url)
        with self.assertRaisesRegex(reshard.Error, "unknown transport 'uxc'"):
            _engine.CheckpointSide("none.rplan", rendezvous="tcp://127.0.0.1:1", transport="uxc")

    def test_an_engine_that_refuses(self):
        """Its error ends all trainer ranks at once, also those that do not call it."""
        import reshard
        from reshard.integrations.vllm_trainer import Trainer

        job = JOB.replace("mesh: {}}", "mesh: {dp: 2}}", 1).replace("[1]%s", "[2]")
        (self.folder / "two.yaml").write_text(job)
        run("reshard-compile", self.folder / "two.yaml", "-o", self.folder / "two.rplan")

        class Refuses:
            def init_weight_transfer_engine(self, info):
                raise RuntimeError("found enable_eplb, expected it off")

        url, errors = "file://" + tempfile.mkdtemp(dir=self.folder), {}

        def join(rank):
            try:
                client = Refuses() if rank == 0 else None
                Trainer(str(self.folder / "two.rplan"), self.weights, client, rank=rank, rendezvous=url, timeout=60)
            except Exception as raised:
                errors[rank] = raised

        begin = time.monotonic()
        threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        self.assertLess(time.monotonic() - begin, 20)
        self.assertRegex(str(errors[0]), "^found enable_eplb, expected it off$")
        self.assertIsInstance(errors[1], reshard.RunError)
        self.assertRegex(str(errors[1]), "^.*rank 2: RuntimeError: found enable_eplb, expected it off$")

    def test_engines_do_not_inherit_the_launcher(self):
        """vLLM's processes begin without torchrun's variables, unless they are ranks of torchrun or do not use
        reshard."""
        from reshard.integrations.vllm import _without_launcher

        variables = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "host",
            "MASTER_PORT": "1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        inherited = lambda: {name for name in variables if name in os.environ}
        for backend, executor, kept in (
            ("reshard", "mp", set()),
            ("reshard", "external_launcher", {*variables}),
            ("nccl", "mp", {*variables}),
        ):
            config = types.SimpleNamespace(
                weight_transfer_config=types.SimpleNamespace(backend=backend),
                parallel_config=types.SimpleNamespace(distributed_executor_backend=executor),
            )
            with unittest.mock.patch.dict(os.environ, variables):
                with _without_launcher(config):
                    self.assertEqual(inherited(), kept, (backend, executor))
                self.assertEqual(inherited(), {*variables})

    def test_the_engines_error_is_the_cause(self):
        engine = Engine(self)
        trainer = self.trainer(engine)
        engine.refuses = "no memory for the update"
        begin = time.monotonic()
        self.assertRaisesRegex(RuntimeError, "no memory for the update", trainer.refit, timeout=2)
        self.assertLess(time.monotonic() - begin, 30)

    def test_an_engine_that_is_stopped(self):
        """Its call has no error, so that of the refit is raised, which names the rank."""
        engine = Engine(self)
        trainer = self.trainer(engine)
        engine.process.send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        self.assertRaisesRegex(TimeoutError, "rank 1", trainer.refit, timeout=2)
        self.assertLess(time.monotonic() - begin, 30)

    def test_trainers_that_cannot_be_synchronized(self):
        """The weights are released, so that the next refit can publish."""
        engine, failures = Engine(self), [RuntimeError("a trainer rank is lost")]

        def synchronize():
            if failures:
                raise failures.pop()

        trainer = self.trainer(engine, "pull", synchronize=synchronize)
        self.step(1)
        self.assertRaisesRegex(RuntimeError, "a trainer rank is lost", trainer.refit)
        self.step(2)
        self.assertEqual(trainer.refit(), 2)
        self.assertEqual(engine.values, {"a": [2], "b": [2]})

    def test_params_that_nothing_covers(self):
        import reshard
        from reshard.integrations.vllm_trainer import shards_of

        more = self.weights | {"c": self.weights["b"]}
        for module, left, text in (
            (more, [], "'c': the module has it, but not the plan"),
            (more, ["*"], "'a': found in left and in the plan"),
            (self.weights, ["c"], "left: 'c' matches no param"),
            ({"a": self.weights["a"]}, [], "'b': the plan has it, but not the module"),
        ):
            self.assertRaisesRegex(reshard.BindError, text, shards_of, module, self.weights, left)
        self.assertEqual(list(shards_of(more, self.weights, ["c"])), ["a", "b"])

    def test_an_engine_is_killed_in_an_update(self):
        engine = Engine(self)
        trainer = self.trainer(engine, "pull")
        self.step(1)
        self.assertEqual(trainer.refit(), 1)
        self.assertEqual(engine.values, {"a": [1], "b": [1]})
        engine.process.send_signal(signal.SIGSTOP)
        threading.Timer(1, os.kill, (engine.process.pid, signal.SIGKILL)).start()
        self.step(2)
        begin = time.monotonic()
        with self.assertRaisesRegex(
            Exception, "the engine has ended|replica 0 rank 0"
        ):  # the latter if release waits for its lease
            trainer.refit(timeout=5)
        self.assertLess(time.monotonic() - begin, 40)
        trainer.attach(None)
        self.step(3)
        self.assertEqual(trainer.refit(timeout=5), 3)
        restarted = Engine(self)
        trainer.attach(restarted)
        self.assertEqual(trainer.refit(), 4)
        self.assertEqual(restarted.values, {"a": [3], "b": [3]})


if __name__ == "__main__":
    unittest.main()

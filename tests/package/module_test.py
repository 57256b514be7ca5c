# SPDX-License-Identifier: Apache-2.0
"""Tests of the installed Python module. package_test.py runs this in an environment with the module and NumPy, and with
PyTorch and JAX if available."""

import array
import ctypes
import importlib.util
import os
import re
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np

import reshard
from device_tensor import DeviceTensor
from reshard import _library, releases
from reshard.rendezvous import store_of

JOB = """version: 1
model:
  dtype: {dtype}
  index: {{layer: 2}}
  tensors:
    l.{{layer}}.up: {{shape: [8, 6], shard: {{0: tp}}}}
    scale: {{shape: []}}
source: {{mesh: {{tp: 2}}}}
target: {{mesh: {{tp: 1}}, ranks: [2]}}
"""


def job(dtype="fp32"):
    Path("job.yaml").write_text(JOB.format(dtype=dtype))
    return "job.yaml"


def has(module):
    return importlib.util.find_spec(module) is not None


class Releases(unittest.TestCase):
    def test_only_tested_releases_are_permitted(self):
        packages = ("no-such-package", "numpy")
        releases.check_release(packages, ("0.1", np.__version__))
        with (
            mock.patch.dict(os.environ, {releases.ANY_VERSION: ""}),
            self.assertRaisesRegex(
                reshard.Error,
                f"no-such-package: found release {np.__version__}, expected 0.1 or 0.2, .*; "
                "RESHARD_ANY_VERSION=1 permits others",
            ),
        ):
            releases.check_release(packages, ("0.1", "0.2"))
        with mock.patch.dict(os.environ, {releases.ANY_VERSION: "1"}):
            releases.check_release(packages, ("0.1",))
        with self.assertRaisesRegex(reshard.Error, "found no installed package no-such-package, expected one"):
            releases.check_release(("no-such-package",), ("0.1",))


class Package(unittest.TestCase):
    def test_a_command_starts_at_once(self):
        """Its script imports nothing that Python has not imported, then becomes the command."""
        code = (
            "import sys; before = set(sys.modules); import reshard.commands; print(*sorted(set(sys.modules) - before))"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        self.assertEqual(found.stdout.split(), ["__future__", "reshard", "reshard.commands"])

    def test_names_are_imported_when_they_are_used(self):
        code = (
            "import reshard; print(*map(type, (getattr(reshard, name) for name in reshard.__all__)), "
            "reshard.errors.Error is reshard.Error)"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        self.assertTrue(found.stdout.endswith(" True\n"), found)
        self.assertLessEqual({*reshard.__all__, "__all__"}, set(dir(reshard)))
        with self.assertRaisesRegex(AttributeError, "module 'reshard' has no attribute 'compiles'"):
            reshard.compiles  # noqa: B018


class Compile(unittest.TestCase):
    def test_overrides(self):
        plan = reshard.compile(job(), source={"mesh": {"tp": 4}}, **{"target.ranks": [7]})
        self.assertEqual([endpoint.ranks for endpoint in plan.endpoints], [(0, 1, 2, 3), (7,)])
        self.assertEqual(plan.world, 8)

    def test_output_and_flags(self):
        plan = reshard.compile(Path(job()), output="out.rplan", flags=["--report=report.json"])
        self.assertEqual(reshard.Plan.open("out.rplan").summary, plan.summary)
        self.assertIn(plan.summary.digest, Path("report.json").read_text())

    def test_temporary_plan_is_deleted_with_its_object(self):
        plan = reshard.compile(job())
        path = Path(plan.path)
        self.assertTrue(path.exists())
        del plan
        self.assertFalse(path.exists())

    def test_compile_error_has_position_and_caret(self):
        Path("wrong.yaml").write_text(JOB.format(dtype="fp33").replace("shape: []", "shape: [fnn]"))
        with self.assertRaises(reshard.CompileError) as raised:
            reshard.compile("wrong.yaml")
        message = str(raised.exception)
        self.assertIn("wrong.yaml:3:", message)
        self.assertIn("'fnn'", message)
        self.assertRegex(message, r"(?m)^ +\^")  # the caret under the position


class Plans(unittest.TestCase):
    def test_summary(self):
        summary = reshard.compile(job()).summary
        held = (2 * 8 * 6 + 1) * 4
        self.assertEqual((summary.world, summary.endpoints, summary.target_bytes), (3, 2, held))
        self.assertEqual(summary.local_bytes + summary.remote_bytes, held)
        self.assertRegex(summary.digest, "^[0-9a-f]{32}$")

    def test_params_of_ranks(self):
        plan = reshard.compile(job("bf16"))
        self.assertEqual(list(plan.params(1)), ["l.0.up", "l.1.up", "scale"])
        self.assertEqual(plan.params(1)["l.1.up"], reshard.Param("l.1.up", "bf16", (4, 6), 48, ""))
        self.assertEqual(plan.params(2, "target")["l.1.up"].shape, (8, 6))
        self.assertEqual(plan.params(2)["scale"].shape, ())
        self.assertEqual(plan.params(0, 0)["scale"].numpy_dtype, np.dtype(ml_dtypes.bfloat16))

    def test_unknown_rank_or_endpoint(self):
        plan = reshard.compile(job())
        for rank, endpoint, message in (
            (3, None, "rank 3 is in no endpoint"),
            (2, "source", "source has no rank 2"),
            (0, "goal", "no endpoint 'goal'.* source, target"),
        ):
            self.assertRaisesRegex(reshard.Error, message, plan.params, rank, endpoint)
        both = reshard.compile(job(), target={"ranks": [0]})
        self.assertRaisesRegex(
            reshard.Error, r"rank 0 is in several endpoints \(source, target\): pass endpoint=…", both.params, 0
        )

    def test_not_a_plan(self):
        Path("junk.rplan").write_bytes(b"junk" * 100)
        self.assertRaisesRegex(reshard.PlanError, "junk.rplan': not a plan", reshard.Plan.open, "junk.rplan")
        self.assertRaisesRegex(reshard.PlanError, "absent.rplan", reshard.Executor, "absent.rplan")


class Running(unittest.TestCase):
    def refit(self, dtype, make):
        """Runs a refit of all ranks in this process; `make` converts a NumPy array to a tensor that shares its
        memory."""
        plan = reshard.compile(job(dtype))
        executor = reshard.Executor(plan)
        arrays = {}
        for endpoint in plan.endpoints:
            for rank in endpoint.ranks:
                held = {name: np.zeros(param.shape, param.numpy_dtype) for name, param in plan.params(rank).items()}
                executor.bind({name: make(value) for name, value in held.items()}, endpoint.role, rank)
                arrays[rank] = held
        executor.prepare()
        self.assertEqual((executor.version, executor.state), (0, "empty"))
        for step in range(1, 3):
            for rank in (0, 1):
                for value in arrays[rank].values():
                    value[...] = (
                        np.arange(value.size).reshape(value.shape) % 7 + 10 * rank * (value.ndim > 0) + step
                    ).astype(value.dtype)
            executor.run(timeout=60)
            for name in ("l.0.up", "l.1.up"):
                expected = np.concatenate([arrays[0][name], arrays[1][name]])
                self.assertEqual(arrays[2][name].tobytes(), expected.tobytes())
                self.assertNotEqual(expected.tobytes(), bytes(expected.nbytes))
            self.assertEqual(arrays[2]["scale"], arrays[0]["scale"])
        self.assertEqual((executor.version, executor.state, executor.ranks), (2, "complete", (0, 1, 2)))
        self.assertGreaterEqual(executor.nbytes, plan.summary.target_bytes)
        self.assertRaisesRegex(reshard.Error, "device 'cpu' has no streams", executor.run, stream=7)
        executor.close()
        self.assertRaisesRegex(reshard.Error, "closed", executor.run)

    def test_digests_and_checked_runs(self):
        plan = reshard.compile(job("bf16"))
        with reshard.Executor(plan) as executor:
            held = {
                rank: {name: np.full(param.shape, 3, param.numpy_dtype) for name, param in plan.params(rank).items()}
                for rank in range(3)
            }
            for rank, tensors in held.items():
                executor.bind(tensors, rank=rank)
            executor.prepare()
            with self.assertRaisesRegex(reshard.Error, "found check=False, expected True or a number of runs"):
                executor.run(first_index=True)
            self.assertRaisesRegex(reshard.Error, "no check of a run on a stream", executor.run, stream=7, check=True)
            executor.run(timeout=60, check=True, changed=True)
            self.assertEqual((executor.version, executor.state, executor.undigested), (1, "complete", ()))
            digests = executor.digest(timeout=60)
            self.assertEqual(list(digests), ["l.0.up", "l.1.up", "scale"])
            self.assertEqual((digests["l.0.up"].dtype, digests["l.0.up"].shape), ("bf16", (8, 6)))
            self.assertRegex(digests["scale"].digest, "^[0-9a-f]{32}$")
            self.assertEqual(executor.digest("target"), digests)
            held[2]["l.1.up"][7, 5] = 0
            self.assertEqual([name for name, each in executor.digest(1).items() if each != digests[name]], ["l.1.up"])
            self.assertRaisesRegex(reshard.Error, "the plan has no endpoint 'goal'", executor.digest, "goal")
            self.assertRaisesRegex(
                reshard.Error,
                "the source has not changed since the last run that was checked",
                executor.run,
                check=1,
                changed=True,
            )

    def test_dlpack(self):
        for dtype in ("fp32", "fp64", "fp16", "i8", "i64", "u16", "bool"):
            with self.subTest(dtype):
                self.refit(dtype, lambda value: value)

    def test_dtypes_of_ml_dtypes(self):
        for dtype in ("bf16", "fp8_e4m3", "fp8_e5m2"):
            with self.subTest(dtype):
                self.refit(dtype, lambda value: value)

    def test_buffer_protocol(self):
        for dtype in ("fp32", "i64", "u8"):
            with self.subTest(dtype):
                self.refit(dtype, memoryview)

    @unittest.skipUnless(has("torch"), "no PyTorch")
    def test_torch(self):
        import torch

        self.refit("fp32", lambda value: torch.from_numpy(value).requires_grad_())
        self.refit("bf16", lambda value: torch.from_numpy(value.view(np.int16)).view(torch.bfloat16))

    @unittest.skipUnless(has("jax"), "no JAX")
    def test_jax_source(self):
        import jax.numpy as jnp

        plan = reshard.compile(job("bf16"))
        executor = reshard.Executor(plan)
        for rank in (0, 1):
            executor.bind(
                {name: jnp.full(param.shape, rank + 1, jnp.bfloat16) for name, param in plan.params(rank).items()},
                rank=rank,
            )
        target = {name: np.zeros(param.shape, param.numpy_dtype) for name, param in plan.params(2).items()}
        executor.bind(target, rank=2)
        executor.prepare()
        executor.run()
        self.assertEqual(target["l.0.up"][:, 0].astype(int).tolist(), [1] * 4 + [2] * 4)

    def test_tensors_are_kept_alive(self):
        plan = reshard.compile(job())
        executor = reshard.Executor(plan)
        value = np.ones((4, 6), np.float32)
        references = sys.getrefcount(value)
        executor.bind({"l.0.up": value}, rank=0)
        self.assertGreater(sys.getrefcount(value), references)
        executor.close()
        self.assertEqual(sys.getrefcount(value), references)

    def test_hooks(self):
        Path("hook.yaml").write_text("""version: 1
model:
  dtype: fp32
  tensors: {w: [4]}
  layouts: {plain: {params: same}, served: {params: {w: {holds: w, refresh: fold}}}}
source: {layout: plain, mesh: {}}
target: {layout: served, mesh: {}, ranks: [1]}
""")
        plan = reshard.compile("hook.yaml")
        self.assertEqual(plan.params(1)["w"].refresh, "fold")
        executor, target, calls = reshard.Executor(plan), np.zeros(4, np.float32), []

        def fold(rank):
            calls.append((rank, target.tolist()))
            if len(calls) == 2:
                raise KeyError("no room")

        executor.bind({"w": np.arange(4, dtype=np.float32)}, rank=0)
        executor.bind({"w": target}, rank=1)
        self.assertRaisesRegex(reshard.BindError, "needs the hook 'fold'", executor.prepare)
        executor.set_hook("fold", fold)
        executor.prepare()
        executor.run()
        self.assertEqual(calls, [(1, [0, 1, 2, 3])])
        with self.assertRaisesRegex(reshard.RunError, "the hook 'fold' failed on rank 1") as raised:
            executor.run()
        self.assertEqual(str(raised.exception.__cause__), "'no room'")
        self.assertEqual((executor.state, executor.version), ("torn", 1))
        executor.run()
        self.assertEqual((executor.state, executor.version), ("complete", 2))

    def test_allocated_params_land_in_groups(self):
        plan = reshard.compile(job())
        order, failing = [], []
        source = {
            rank: {name: np.full(param.shape, rank + 1.0, "f4") for name, param in plan.params(rank).items()}
            for rank in (0, 1)
        }
        repacked = {}

        def land(params):
            order.append(list(params))
            if failing:
                raise ValueError("no room")
            for name, param in params.items():
                self.assertEqual((param.rank, param.endpoint, param.nbytes, param.address % 64), (2, 1, 192, 0))
                repacked[name] = param.numpy().T.copy()

        with reshard.Executor(plan) as executor:
            for rank, tensors in source.items():
                executor.bind(tensors, "source", rank)
            scale = np.zeros((), "f4")
            executor.bind({"scale": scale}, "target", 2)
            for name in ("l.1.up", "l.0.up"):
                self.assertEqual(executor.allocate(name, "target", 2).shape, (8, 6))
            for name, text in (("l.2.up", "target rank 2 param 'l.2.up': found no such param"),):
                self.assertRaisesRegex(reshard.BindError, text, executor.allocate, name, "target", 2)
            executor.on_landed("l.1.*", land)
            executor.on_landed("l.0.*", land)
            executor.prepare()
            executor.run(timeout=60)
            self.assertEqual(order, [["l.0.up"], ["l.1.up"]])  # the plan's order
            for values in repacked.values():
                self.assertTrue((values == np.repeat([1.0, 2.0], 4)).all())
            failing.append(1)
            self.assertRaisesRegex(
                reshard.RunError,
                r"target rank 2: the hook of on_landed\('l\.0\.\*'\) failed: no room",
                executor.run,
                timeout=60,
            )
            self.assertEqual(executor.state, "torn")
            self.assertEqual(len(order), 3)  # no hook after the one that failed
            failing.clear()
            source[0]["l.0.up"][...] = 5
            executor.run(timeout=60)
            self.assertEqual(executor.state, "complete")
            self.assertTrue((repacked["l.0.up"][:, :4] == 5).all())
        with reshard.Executor(plan) as executor:
            for rank, tensors in source.items():
                executor.bind(tensors, "source", rank)
            executor.bind({name: np.zeros(param.shape, "f4") for name, param in plan.params(2).items()}, "target", 2)
            executor.on_landed("l.0.*", land)
            executor.prepare()
            self.assertRaisesRegex(reshard.RunError, "no allocated param matches 'l.0.\\*'", executor.run, timeout=60)

    def test_transforms(self):
        Path("transform.yaml").write_text("""version: 1
model:
  dtype: fp32
  tensors: {w: [4, 2], e: [0]}
  layouts:
    train: {params: {w: {holds: w, shard: {0: tp}, transform: unpack}, e: {holds: e}}}
    serve: {params: {w: {holds: w, transform: pack}, e: {holds: e, transform: pack}}}
source: {layout: train, mesh: {tp: 2}}
target: {layout: serve, mesh: {}, ranks: [2]}
""")
        plan = reshard.compile("transform.yaml")
        held = {
            rank: {name: (param.transform, param.shape, param.nbytes) for name, param in plan.params(rank).items()}
            for rank in (0, 2)
        }
        self.assertEqual(
            held,
            {
                0: {"w": ("unpack", (2, 2), 16), "e": ("", (0,), 0)},
                2: {"w": ("pack", (4, 2), 32), "e": ("pack", (0,), 0)},
            },
        )
        executor, calls, room = reshard.Executor(plan), [], {}

        def unpack(param):
            calls.append(("unpack", param.rank, param.name))
            self.assertEqual(
                (param.transform, param.endpoint, param.dtype, param.shape, param.nbytes),
                ("unpack", 0, "fp32", (2, 2), 16),
            )
            self.assertEqual((param.device, param.stream), ("cpu", 0))
            param.numpy()[...] = param.rank + 1

        def begin(param):
            param.memory[:] = bytes(param.nbytes)
            calls.append(("begin", param.rank, param.name))

        def pack(param):
            calls.append(("pack", param.rank, param.name))
            if param.name in room:
                raise KeyError("no room")
            room[param.name] = param.numpy().copy()

        for rank in 0, 1:
            executor.bind({"e": np.zeros(0, np.float32)}, rank=rank)
        executor.set_transform("unpack", prepare_send=unpack)
        self.assertRaisesRegex(
            reshard.BindError,
            "rank 2 param 'w' needs finalize of the transform 'pack', which is not set",
            executor.prepare,
        )
        with self.assertRaisesRegex(
            reshard.BindError, "target rank 2 param 'w' must not be bound: its memory belongs to the transform 'pack'"
        ):
            executor.bind({"w": np.zeros((4, 2), np.float32)}, rank=2)
        executor.set_transform("pack", prepare_receive=begin, finalize=pack)
        executor.prepare()
        executor.run()
        self.assertEqual(
            calls,
            [
                ("unpack", 0, "w"),
                ("unpack", 1, "w"),
                ("begin", 2, "w"),
                ("begin", 2, "e"),
                ("pack", 2, "w"),
                ("pack", 2, "e"),
            ],
        )
        self.assertEqual(executor.bytes_by, {"local": 32, "shared_memory": 0, "messages": 0, "messages_inside_host": 0})
        self.assertEqual(room["w"].tolist(), [[1, 1], [1, 1], [2, 2], [2, 2]])
        with self.assertRaisesRegex(
            reshard.RunError, "finalize of the transform 'pack' failed for param 'w' on rank 2"
        ) as raised:
            executor.run()
        self.assertEqual(str(raised.exception.__cause__), "'no room'")
        self.assertEqual((executor.state, executor.version), ("torn", 1))

    def test_neg_exp(self):
        """The built-in transform in both directions: A_log to A = -exp(A_log) in fp32, and back to A_log."""
        Path("neg_exp.yaml").write_text("""version: 1
model:
  dtype: bf16
  tensors: {A_log: [8]}
  layouts:
    train: {params: {A_log: {holds: A_log, shard: {0: tp}}}}
    serve: {params: {mixer.A: {holds: A_log, shard: {0: tp}, transform: neg_exp}}}
source: {layout: train, mesh: {tp: 4}}
target: {layout: serve, mesh: {tp: 2}}
""")
        logs = np.log(np.arange(1, 9)).astype(ml_dtypes.bfloat16)
        kinds = [lambda count: np.zeros(count, np.float32)]
        if has("torch"):
            import torch

            kinds.append(lambda count: torch.nn.Parameter(torch.zeros(count)))
        for zeros in kinds:
            plan = reshard.compile("neg_exp.yaml")
            live = {0: {"mixer.A": zeros(4)}, 1: {"mixer.A": zeros(4), "other": None}}
            with reshard.Executor(plan) as executor:
                for rank in range(4):
                    executor.bind({"A_log": logs[2 * rank : 2 * rank + 2].copy()}, "source", rank)
                executor.set_transform(
                    "neg_exp", finalize=lambda param: reshard.neg_exp(live[param.rank])["finalize"](param)
                )
                executor.prepare()
                executor.run()
            for rank in live:
                found = np.array(live[rank]["mixer.A"].tolist(), np.float32)
                np.testing.assert_allclose(found, -np.exp(logs[4 * rank : 4 * rank + 4].astype(np.float32)), rtol=1e-6)
            reverse = reshard.compile(
                "neg_exp.yaml", source={"layout": "serve", "mesh": {"tp": 1}}, target={"layout": "train", "mesh": {}}
            )
            with reshard.Executor(reverse) as executor:
                whole, restored = zeros(8), np.zeros(8, ml_dtypes.bfloat16)
                for i, value in enumerate([*live[0]["mixer.A"].tolist(), *live[1]["mixer.A"].tolist()]):
                    (whole.data if hasattr(whole, "detach") else whole)[i] = value
                executor.bind({"A_log": restored}, "target")
                executor.set_transform("neg_exp", **reshard.neg_exp({"mixer.A": whole}))
                executor.prepare()
                executor.run()
                self.assertEqual(restored.tobytes(), logs.tobytes())

    def test_neg_exp_of_a_wrong_tensor(self):
        param = reshard.Transformed("neg_exp", "mixer.A", 1, 0, "bf16", (4,), 8, "cpu", 0, 0)
        for tensors, message in (
            (
                {"A": np.zeros(4, np.float32)},
                "param 'mixer.A' of transform 'neg_exp' is missing in the tensors given to neg_exp",
            ),
            ({"mixer.A": np.zeros(8, np.float32)}, r"param 'mixer.A': found fp32 \[8\], expected fp32 \[4\]"),
            ({"mixer.A": np.zeros(4, np.float16)}, r"param 'mixer.A': found fp16 \[4\], expected fp32 \[4\]"),
        ):
            with self.assertRaisesRegex(reshard.Error, message):
                reshard.neg_exp(tensors)["finalize"](param)

    def test_minus_one(self):
        """The built-in transform in both directions, with values in fp32 and bf16."""
        for dtype in "fp32", "bf16":
            Path("minus_one.yaml").write_text(f"""version: 1
model:
  dtype: {dtype}
  tensors: {{norm: [4]}}
  layouts:
    plain: {{params: {{norm: {{holds: norm}}}}}}
    centered: {{params: {{out_norm: {{holds: norm, transform: minus_one}}}}}}
source: {{layout: plain, mesh: {{}}}}
target: {{layout: centered, mesh: {{}}, ranks: [1]}}
""")
            numpy_dtype = np.float32 if dtype == "fp32" else ml_dtypes.bfloat16
            norms = np.array([0.75, 1, 1.5, 1.0078125]).astype(numpy_dtype)
            kinds = [(np.zeros(4, numpy_dtype), np.zeros(4, numpy_dtype))]
            if has("torch"):
                import torch

                kinds.append(
                    (
                        torch.nn.Parameter(
                            torch.zeros(4, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
                        ),
                        np.zeros(4, numpy_dtype),
                    )
                )
            for live, restored in kinds:
                plan = reshard.compile("minus_one.yaml")
                with reshard.Executor(plan) as executor:
                    executor.bind({"norm": norms.copy()}, "source", 0)
                    executor.set_transform("minus_one", **reshard.minus_one({"out_norm": live}))
                    executor.prepare()
                    executor.run()
                self.assertEqual(
                    [float(value) for value in (live.detach() if hasattr(live, "detach") else live)],
                    [-0.25, 0, 0.5, 0.0078125],
                )
                reverse = reshard.compile(
                    "minus_one.yaml",
                    source={"layout": "centered", "mesh": {}},
                    target={"layout": "plain", "mesh": {}, "ranks": [1]},
                )
                with reshard.Executor(reverse) as executor:
                    executor.bind({"norm": restored}, "target", 1)
                    executor.set_transform("minus_one", **reshard.minus_one({"out_norm": live}))
                    executor.prepare()
                    executor.run()
                self.assertEqual(restored.tobytes(), norms.tobytes())


class Refusals(unittest.TestCase):
    """Errors of bind state what was found and what was expected."""

    def setUp(self):
        self.plan = reshard.compile(job())
        self.executor = reshard.Executor(self.plan)

    def refused(self, tensor, message, rank=2, name="l.0.up"):
        with self.assertRaisesRegex(reshard.BindError, message) as raised:
            self.executor.bind({name: tensor}, rank=rank)
        self.assertIn(f"rank {rank}", str(raised.exception))

    def test_tensors(self):
        good = np.zeros((8, 6), np.float32)
        self.refused(good.astype(np.float16), "target rank 2 param 'l.0.up': found dtype fp16, expected fp32")
        self.refused(good.astype(ml_dtypes.bfloat16), "found dtype bf16, expected fp32")
        self.refused(good.astype(">f4"), "found dtype >f4 of foreign byte order, expected fp32")
        self.refused(good.astype(np.complex64), "expected fp32")
        self.refused(good.reshape(6, 8), r"found shape \[6, 8\], expected \[8, 6\]")
        self.refused(good.T.copy().T, r"found strides \[1, 8\] for shape \[8, 6\], expected row-major without gaps")
        self.refused(np.zeros((8, 12), np.float32)[:, ::2], "found strides")
        self.refused(np.zeros(48 * 4 + 4, np.int8)[4:].view(np.float32).reshape(8, 6)[::-1], "found strides")
        self.refused(DeviceTensor(good), "found device cuda:1, expected cpu")
        self.refused([1.0] * 48, "found list, expected a tensor")
        self.refused(array.array("f", [0] * 48), r"found shape \[48\], expected \[8, 6\]")
        self.refused(memoryview(bytes(192)), "read-only")
        self.refused(good, "did you mean 'l.0.up'", name="l.0.upp")
        frozen = good.copy()
        frozen.flags.writeable = False
        self.refused(frozen, "found read-only memory, expected writable memory for a target")
        self.executor.bind({"l.0.up": good}, rank=2)
        self.refused(good, "already bound")

    def test_sources_may_be_read_only(self):
        frozen = np.zeros((4, 6), np.float32)
        frozen.flags.writeable = False
        self.executor.bind({"l.0.up": frozen}, rank=0)

    def test_missing_and_overlapping(self):
        self.assertRaisesRegex(
            reshard.BindError, "not all instances are bound: . of . (is|are) not, the first is ", self.executor.prepare
        )
        same = np.zeros((8, 6), np.float32)
        self.executor.bind({"l.0.up": same, "l.1.up": same}, rank=2)
        self.assertRaisesRegex(reshard.BindError, "overlap in memory", self.executor.prepare)

    def test_which_rank(self):
        self.assertRaisesRegex(
            reshard.BindError, "this process has 3 ranks: pass rank=… to select one of 0, 1, 2", self.executor.bind, {}
        )

    def test_order_and_options(self):
        self.assertRaisesRegex(reshard.Error, "run before prepare", self.executor.run)
        for stream, timeout, message in (
            (7, None, "enqueue before prepare"),
            (7, 1, "found a stream and a timeout"),
            ("7", None, "stream: found str, expected a stream"),
        ):
            self.assertRaisesRegex(reshard.Error, message, self.executor.run, stream, timeout)
        with self.assertRaisesRegex(reshard.Error, "unknown transport 'pigeon'"):
            reshard.Executor(self.plan, transport="pigeon")
        self.assertRaisesRegex(reshard.Error, "rank 9", reshard.Executor, self.plan, 9)
        self.assertEqual(reshard.Executor(self.plan, [np.int64(2), 0]).ranks, (2, 0))
        self.assertEqual(reshard.Executor(self.plan, np.int64(1)).ranks, (1,))
        with self.assertRaisesRegex(reshard.Error, "timeout: found 0 seconds, expected more than 0"):
            self.executor.run(timeout=0)

    def test_a_plan_that_was_replaced(self):
        """The library opens the file again: bind would check by another plan's dtypes."""
        plan = reshard.compile(job(), output="replaced.rplan")
        executor = reshard.Executor(plan)
        reshard.compile(job("bf16"), output="replaced.rplan")
        for call in (lambda: reshard.Executor(plan), lambda: executor.replace(plan)):
            self.assertRaisesRegex(
                reshard.PlanError,
                "'replaced.rplan' was replaced since this Plan was opened: "
                f"it had the digest {plan.summary.digest}; open it again",
                call,
            )
        self.assertEqual(executor.plan, plan)
        executor.replace("replaced.rplan")
        self.assertEqual(executor.plan.params(2)["scale"].dtype, "bf16")

    def test_values_that_c_cannot_hold(self):
        """ctypes would pass the last bits of a number, and a text up to its first NUL."""
        plan, executor, good = self.plan, self.executor, np.zeros((8, 6), np.float32)
        most = {32: "expected 0 to 2^32 - 1", 64: "expected 0 to 2^64 - 1"}
        for call, text in (
            (lambda: reshard.Executor(plan, 2**32), f"rank: found {2**32}, {most[32]}"),
            (lambda: reshard.Executor(plan, -1), f"rank: found -1, {most[32]}"),
            (lambda: reshard.Executor(plan, [0, 2**32 + 1]), f"rank: found {2**32 + 1}, {most[32]}"),
            (lambda: reshard.Executor(plan, "0"), "rank: found '0', expected a whole number"),
            (lambda: reshard.Executor(plan, 0.5), "rank: found 0.5, expected a whole number"),
            (lambda: reshard.Executor(plan, threads=-1), f"threads: found -1, {most[32]}"),
            (lambda: reshard.Executor(plan, threads=2**32), f"threads: found {2**32}, {most[32]}"),
            (lambda: reshard.Executor(plan, communicator=2**64), f"communicator: found {2**64}, {most[64]}"),
            (lambda: reshard.Executor(plan, insecure=2**32), f"insecure: found {2**32}, expected True or False"),
            (lambda: reshard.Executor(plan, pull="no"), "pull: found 'no', expected True or False"),
            (
                lambda: reshard.Executor(plan, no_local_shortcut=None),
                "no_local_shortcut: found None, expected True or False",
            ),
            (
                lambda: reshard.Executor(plan, join_timeout=float("nan")),
                "timeout: found nan seconds, expected more than 0",
            ),
            (
                lambda: reshard.Executor(plan, transport="threads\0"),
                "transport: found 'threads\\x00', expected a text without NUL characters",
            ),
            (lambda: reshard.Executor(plan, transport=None), "transport: found NoneType, expected a text"),
            (lambda: reshard.Executor(plan, device="cpu\0"), "device: found 'cpu\\x00'"),
            (lambda: reshard.Executor(plan, job="a\0b"), "job: found 'a\\x00b'"),
            (lambda: reshard.Executor(plan, rendezvous="env://\0"), "rendezvous: found 'env://\\x00'"),
            (lambda: reshard.Executor(plan.path + "\0.rplan"), "plan: found "),
            (lambda: reshard.Plan.open(plan.path + "\0"), "plan: found "),
            (lambda: executor.replace(plan, 2**32), f"rank: found {2**32}, {most[32]}"),
            (lambda: executor.replace(plan, rendezvous="file:///a\0"), "rendezvous: found 'file:///a\\x00'"),
            (lambda: executor.bind({"l.0.up\0x": good}, rank=2), "param: found 'l.0.up\\x00x'"),
            (lambda: executor.bind({"l.0.up": good}, "target", 2**32 + 2), f"target has no rank {2**32 + 2}"),
            (lambda: executor.bind({5: good}, rank=2), "param: found int, expected a text"),
            (lambda: executor.set_hook("a\0", print), "hook: found 'a\\x00'"),
            (lambda: executor.set_transform("a\0", print), "transform: found 'a\\x00'"),
            (lambda: executor.run(2**64), f"stream: found {2**64}, {most[64]}"),
            (lambda: executor.run(check=True, changed=2**32), f"changed: found {2**32}, expected True or False"),
            (
                lambda: executor.digest(allow_undigested=2**32),
                f"allow_undigested: found {2**32}, expected True or False",
            ),
            (lambda: executor.all_reduce_min(2**63), f"value: found {2**63}, expected -2^63 to 2^63 - 1"),
            (lambda: executor.all_reduce_min(-(2**63) - 1), "expected -2^63 to 2^63 - 1"),
            (lambda: executor.all_reduce_min(1.5), "value: found 1.5, expected a whole number"),
            (lambda: reshard.compile("job\0.yaml"), "argument of reshard-compile: found "),
            (lambda: reshard.compile(job(), **{"source.mesh.tp": "2\0"}), "argument of reshard-compile: found "),
        ):
            with self.subTest(text), self.assertRaisesRegex(reshard.Error, re.escape(text)):
                call()
        for least in -(2**63), 2**63 - 1, np.int64(7):
            self.assertEqual(executor.all_reduce_min(least), least)

    def test_secrets(self):
        """A secret that C would cut, or take for none."""
        for secret in "", "\0", "\0abc", "abc\0def":
            self.assertRaisesRegex(
                reshard.Error,
                "^secret: found an empty text, or one with NUL characters, "
                "expected 1 to 4096 bytes, or None for the one in "
                "RESHARD_SECRET$",
                reshard.Executor,
                self.plan,
                0,
                secret=secret,
            )
        with (
            mock.patch.dict(os.environ, {"RESHARD_SECRET": ""}),
            self.assertRaisesRegex(
                reshard.Error, '^RESHARD_SECRET: found "", expected 1 to 4096 bytes; unset it for no secret$'
            ),
        ):
            reshard.Executor(self.plan, 0, transport="ucx", rendezvous=f"file://{Path.cwd()}", join_timeout=5)


class Stores(unittest.TestCase):
    """Stores of Python as reshard_store, called as libreshard calls them."""

    def setUp(self):
        self.raised = []

    def get(self, store, key, capacity=100):
        """The status, and the value or its size."""
        buffer, size = ctypes.create_string_buffer(capacity), ctypes.c_size_t()
        status = store_of(store, self.raised.append).get(None, key, buffer, capacity, size)
        return status, buffer.raw[: size.value] if size.value <= capacity else size.value

    def test_a_store_that_raises_or_returns_nothing_for_missing_keys(self):
        class Raises(dict):
            set = dict.__setitem__
            get = dict.__getitem__

        class ReturnsNone(dict):
            set = dict.__setitem__

        class TimesOut(ReturnsNone):
            def get(self, key):
                if key not in self:
                    raise TimeoutError
                return self[key]

        for store in (Raises(), ReturnsNone(), TimesOut()):
            value = b"a\0b"
            self.assertEqual(self.get(store, b"key"), (_library.TIMEOUT, b""))
            self.assertEqual(store_of(store, self.raised.append).set(None, b"key", value, len(value)), _library.OK)
            self.assertEqual(store, {"key": value})
            self.assertEqual(self.get(store, b"key"), (_library.OK, value))
            self.assertEqual(self.get(store, b"key", 2), (_library.OK, 3))
        self.assertEqual(self.raised, [])

    def test_a_store_that_waits_is_asked_first(self):
        class Waits(dict):
            set = dict.__setitem__

            def check(self, keys):
                return all(key in self for key in keys)

            def get(self, key):
                assert key in self, "get would wait"
                return self[key]

        store = Waits()
        self.assertEqual(self.get(store, b"key"), (_library.TIMEOUT, b""))
        store.set("key", b"value")
        self.assertEqual(self.get(store, b"key"), (_library.OK, b"value"))
        self.assertEqual(self.raised, [])

    def test_failures(self):
        class Ends:
            def set(self, key, value):
                raise ConnectionError("gone")

            def get(self, key):
                raise ConnectionError("gone")

        class Text(dict):
            set = dict.__setitem__

        self.assertEqual(self.get(Ends(), b"key")[0], _library.FAILED)
        self.assertEqual(store_of(Ends(), self.raised.append).set(None, b"key", b"", 0), _library.FAILED)
        self.assertEqual(self.get(Text(key="text"), b"key")[0], _library.FAILED)
        self.assertEqual(
            [str(raised) for raised in self.raised],
            ["gone", "gone", "store: get('key') returned str, expected bytes, or None for a key that is not set"],
        )
        with self.assertRaisesRegex(
            reshard.Error, "rendezvous: found int without set\\(\\), expected a URL, or a store"
        ):
            reshard.Executor(reshard.compile(job()), 0, transport="ucx", rendezvous=5)

    def test_options_reach_the_library(self):
        plan = reshard.compile(job())
        for options, text in (
            ({}, "transport 'ucx' needs a rendezvous"),
            ({"rendezvous": "udp://a"}, "rendezvous 'udp://a': found the scheme 'udp'"),
            ({"rendezvous": "tcp://192.0.2.1:1"}, "needs a secret"),
            ({"rendezvous": "file:///no/such", "secret": "a" * 5000}, "the secret has 5000 bytes"),
            (
                {"rendezvous": "file:///no/such", "job": "j", "insecure": True},
                "cannot make the folder '/no/such': No such file or directory",
            ),
        ):
            with self.assertRaisesRegex(reshard.Error, re.escape(text)):
                reshard.Executor(plan, 0, transport="ucx", join_timeout=5, **options)


POOL = """version: 1
model:
  dtype: fp32
  tensors:
    w: {shape: [8, 6], shard: {0: tp}}
source: {mesh: {tp: 4}}
target: {mesh: {tp: 2}, replicas: 3}
"""


class Pull(unittest.TestCase):
    """Pull mode, as far as one process can show it; tests/e2e/pull/replicas_test.py has the rest."""

    def setUp(self):
        Path("pool.yaml").write_text(POOL)
        self.plan = reshard.compile("pool.yaml")
        self.store = {}

    def test_ranks_of_replicas(self):
        """The plan has the ranks of replica 0; those of all other replicas have the same params."""
        self.assertEqual([endpoint.ranks for endpoint in self.plan.endpoints], [(0, 1, 2, 3), (4, 5)])
        for rank in (5, 7, np.int64(9), 4 + 2 * 65536 - 1):
            self.assertEqual(self.plan.endpoint(None, rank).role, "target")
            self.assertEqual(self.plan.params(rank), self.plan.params(5, "target"))
        for rank in (4 + 2 * 65536, -1, 2**32 + 4):
            self.assertRaisesRegex(reshard.Error, f"rank {rank} is in no endpoint", self.plan.params, rank)
        self.assertRaisesRegex(reshard.Error, "source has no rank 6", self.plan.params, 6, "source")
        with self.assertRaisesRegex(reshard.Error, "rank 3 is in no endpoint"):  # without `replicas`
            reshard.compile(job()).params(3)

    def test_without_pull_mode(self):
        executor = reshard.Executor(self.plan)
        for call, name in (
            (lambda: executor.publish(1), "publish"),
            (lambda: executor.publish(1, check=True), "publish"),
            (executor.release, "release"),
            (executor.pull, "pull"),
            (lambda: executor.pull(check=True), "pull"),
            (executor.replicas, "replicas"),
        ):
            self.assertRaisesRegex(reshard.Error, f"^{name}.*pull", call)

    def test_arguments(self):
        executor = reshard.Executor(self.plan)
        for version in (-1, 2**64):
            for call in (executor.publish, executor.pull):
                with self.assertRaisesRegex(reshard.Error, f"version: found {version}, expected 0 to 2\\^64 - 1"):
                    call(version)
        with self.assertRaisesRegex(reshard.Error, "pull: found allow_undigested without check"):
            executor.pull(1, allow_undigested=True)
        for call in (executor.release, lambda timeout: executor.pull(1, timeout)):
            self.assertRaisesRegex(reshard.Error, "timeout: found 0 seconds, expected more than 0", call, 0)

    def test_a_replica_cannot_change(self):
        with self.assertRaises(AttributeError):
            reshard.Replica(0, 2, "complete", 3).version = 4


class Structs(unittest.TestCase):
    """The ctypes structs equal the structs of the headers, field by field, and have the sizes of the library."""

    def headers(self):
        """The text of the C headers without comments."""
        text = "".join(
            (reshard.PREFIX / "include" / "reshard" / name).read_text() for name in ("reshard.h", "reshard_plan.h")
        )
        return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)

    def test_fields(self):
        structs = re.findall(r"typedef struct \{([^}]*)\} (\w+);", self.headers())
        self.assertEqual({name for _, name in structs}, set(_library.STRUCTS))
        for body, name in structs:
            with self.subTest(name):
                expected = [a or b for a, b in re.findall(r"\(\*(\w+)\)\([^)]*\);|(\w+);", body)]
                ours = [field for field, _ in _library.STRUCTS[name]._fields_]
                self.assertGreaterEqual(len(expected), 4)
                self.assertEqual(ours, expected)
                self.assertEqual(ours[0], "size")
                self.assertEqual(_library.STRUCTS[name]().size, ctypes.sizeof(_library.STRUCTS[name]))

    def test_sizes(self):
        lines = "".join(
            f'printf("%zu %zu\\n", sizeof({name}), reshard_struct_size("{name}"));' for name in _library.STRUCTS
        )
        Path("sizes.c").write_text(
            f"#include <reshard/reshard_plan.h>\n#include <stdio.h>\nint main(void) {{ {lines} return 0; }}\n"
        )
        prefix = reshard.PREFIX
        subprocess.run(
            [
                "cc",
                "-std=c99",
                f"-I{prefix}/include",
                "sizes.c",
                "-o",
                "sizes",
                f"-L{prefix}/lib",
                "-lreshard",
                f"-Wl,-rpath,{prefix}/lib",
            ],
            check=True,
        )
        sizes = subprocess.run(["./sizes"], capture_output=True, text=True, check=True).stdout.splitlines()
        self.assertEqual(
            sizes, [f"{ctypes.sizeof(struct)} {ctypes.sizeof(struct)}" for struct in _library.STRUCTS.values()]
        )

    def test_other_size(self):
        class Older(ctypes.Structure):
            _fields_ = _library.Options._fields_[:-2]

        self.assertRaisesRegex(
            ImportError,
            "reshard_options: found 96 bytes in the Python module, expected 112 "
            "as in libreshard: their versions differ",
            _library.check_sizes,
            _library.library,
            {"reshard_options": Older},
        )

    def test_options_without_size(self):
        options, executor = _library.Options(), ctypes.c_void_p()
        options.size = 0
        status = _library.library.reshard_open(
            reshard.compile(job()).path.encode(), None, 0, ctypes.byref(options), ctypes.byref(executor)
        )
        error = _library.error_of(status, _library.library.reshard_error(executor))
        _library.library.reshard_close(executor)
        self.assertRegex(
            str(error),
            "reshard_options.size: found 0, expected 88 or more; "
            "initialize the struct with RESHARD_OPTIONS_INITIALIZER",
        )


if __name__ == "__main__":
    unittest.main()

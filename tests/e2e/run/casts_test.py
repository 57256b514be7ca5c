# SPDX-License-Identifier: Apache-2.0
"""Casts during a run: random jobs run twice, with the same and with other dtypes on the target. The second result must
equal the first one cast by ml_dtypes, bit for bit. Also over MPI. RESHARD_BIN: the folder of the commands; needs
numpy and ml_dtypes."""

import copy
import json
import os
import random
import shutil
import tempfile
import unittest
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import commands
import fake_backend
import generate
import mpi_test
from commands import job_of

BIN = commands.BIN
run = partial(commands.run, code=None)  # callers check the exit code
FULL = "RESHARD_FULL" in os.environ
JOBS = 504 if FULL else 42
TYPES = {
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
# Tensors of odd lengths come first, so that chunks of messages begin within elements.
WEIGHTS = mpi_test.WEIGHTS | {
    "tensors": {"a.odd": {"shape": [4099], "dtype": "u8"}, "b.odd": {"shape": [4097, 3], "dtype": "u8"}}
    | mpi_test.WEIGHTS["tensors"]
}
NAMES = ["fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"]


def tensors(path):
    """Names to (dtype, bytes) of a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return {
        name: (entry["dtype"], data[8 + length + entry["data_offsets"][0] : 8 + length + entry["data_offsets"][1]])
        for name, entry in json.loads(data[8 : 8 + length]).items()
        if name != "__metadata__"
    }


def same(plain, cast, rule):
    """Whether `cast` equals `plain`, cast to its dtype by a rule for values beyond its range; any NaN equals any
    NaN."""
    (source, before), (target, after) = plain, cast
    if source == target:
        return before == after
    values, found = np.frombuffer(before, TYPES[source]), np.frombuffer(after, TYPES[target])
    wide = values.astype(np.float32)
    widens = target == "F32" or (source.startswith("F8") and not target.startswith("F8"))
    if not widens and (rule == "saturate" or target == "F8_E4M3"):  # which has no infinity
        limit = float(ml_dtypes.finfo(TYPES[target]).max)
        wide = np.clip(wide, -limit, limit)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = wide.astype(TYPES[target])
    nan = np.isnan(expected.astype(np.float32))
    item = np.dtype(f"u{expected.itemsize}")
    return np.array_equal(nan, np.isnan(found.astype(np.float32))) and np.array_equal(
        expected.view(item)[~nan], found.view(item)[~nan]
    )


def try_job(seed):
    """Returns counts of the casts by dtypes, and why the job is skipped, or an error, or ''."""
    rng = random.Random(seed)
    node, _, _ = generate.generate(rng, generate.CELLS[seed * 37 % len(generate.CELLS)])
    node["options"] = ({}, {"topology": {"ranks_per_node": 2}}, {"staging": 4096})[seed % 3]
    cast, rule = copy.deepcopy(node), ("saturate", "inf")[seed % 2]
    for target in cast["target"] if isinstance(cast["target"], list) else [cast["target"]]:
        target |= {"dtype": rng.choice(NAMES)}
        target |= {"convert": "saturate" if target["dtype"] == "fp8_e4m3" else rule}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for kind, each in (("plain", node), ("cast", cast)):
            (work / f"{kind}.yaml").write_text(json.dumps(each))
            done = run("reshard-compile", work / f"{kind}.yaml", "-o", work / f"{kind}.rplan", "--verify-each")
            if done.returncode != 0:
                return (
                    Counter(),
                    "invalid job"
                    if kind == "plain"
                    else "several dtypes in one param"
                    if "expected one dtype" in done.stderr
                    else done.stderr,
                )
        run("reshard-exec", work / "plain.rplan", "--synthesize", f"--source={work / 'source'}")
        for kind in ("plain", "cast"):
            done = run(
                "reshard-exec",
                work / f"{kind}.rplan",
                f"--source={work / 'source'}",
                f"--target={work / kind}",
                "--check",
            )
            if done.returncode != 0:
                return Counter(), f"seed {seed}: {done.stdout}{done.stderr}"
        if problem := fake_backend.difference_on_device(work / "cast.rplan", work / "source", work / "cast"):
            return Counter(), f"seed {seed}: {problem}"
        done = run("reshard-inspect", work / "cast.rplan", "--verify")
        if done.returncode != 0:
            return Counter(), f"seed {seed}: {done.stdout}{done.stderr}"
        counts = Counter()
        for path in sorted((work / "plain").rglob("*.safetensors")):
            before, after = tensors(path), tensors(work / "cast" / path.relative_to(work / "plain"))
            if before.keys() != after.keys():
                return counts, f"seed {seed}: other tensors in {path.name}"
            for tensor in before:
                if not same(before[tensor], after[tensor], rule):
                    return (
                        counts,
                        f"seed {seed}: '{tensor}' of {path.name} is not {before[tensor][0]} cast to {after[tensor][0]}",
                    )
                counts[f"{before[tensor][0]} -> {after[tensor][0]}"] += before[tensor][0] != after[tensor][0]
        return +counts, ""


class Casts(unittest.TestCase):
    def test_random_jobs(self):
        total, left, done = Counter(), Counter(), 0
        with ThreadPoolExecutor(2) as pool:
            for counts, problem in pool.map(try_job, range(1, 40 * JOBS)):
                if problem in ("invalid job", "several dtypes in one param"):
                    left[problem] += 1
                    continue
                self.assertEqual(problem, "")
                done += bool(counts)
                total += counts
                if done == JOBS:
                    pool.shutdown(cancel_futures=True)
                    break
        self.assertEqual(done, JOBS)
        print(f"{done} jobs, params cast: {dict(sorted(total.items()))}; skipped: {dict(left)}")
        self.assertGreater(len(total), 8)

    def test_over_mpi(self):
        """Every kind of schedule with a wider and a narrower dtype; in full each with and without shared memory."""
        for source, target, options in mpi_test.KINDS:
            for dtype, methods in (
                ("fp32", ((), ("--no-local-shortcut",))),
                ("fp8_e5m2", (("--no-local-shortcut",), ())),
            ):
                with self.subTest(source=source, target=target, dtype=dtype), tempfile.TemporaryDirectory() as name:
                    job = Path(name) / "job.yaml"
                    cast = target | {"dtype": dtype, "convert": "rne"}
                    keys = job_of(WEIGHTS, source, cast, options=options)
                    job.write_text(json.dumps(keys))
                    done = run("reshard-compile", job, "-o", Path(name) / "plan", f"--report={name}/report")
                    self.assertEqual(done.returncode, 0, done.stderr)
                    world = json.loads((Path(name) / "report").read_text())["world"]
                    for method in methods if FULL else methods[:1]:
                        command = "reshard-exec plan --transport=mpi --synthesize --check --timeout=60"
                        done = commands.mpirun(world, command, *method, cwd=name)
                        self.assertEqual(done.stdout.count("bytes right"), world, done.stdout)

    def test_values_beyond_the_range(self):
        """A finite value beyond the range is an error that names the param, unless the job says what becomes of it; an
        infinity of the source stays one."""
        rules = {"saturate": lambda values, most: np.clip(values, -most, most), "inf": lambda values, most: values}
        with tempfile.TemporaryDirectory() as name:
            work = Path(name)
            values = {"fine": [1.0, -2.0, np.inf], "layers.0.w": [1.0, 3.0, 4.0], "layers.1.w": [1.0, -70000.0, np.nan]}
            (work / "in").mkdir()
            save_file({key: np.array(each, np.float32) for key, each in values.items()}, work / "in/model.safetensors")
            model = {"dtype": "fp32", "index": {"layer": 2}, "tensors": {"fine": [3], "layers.{layer}.w": [3]}}

            def execute(code, dtype, convert, *more):
                target = {"storage": "out", "dtype": dtype, "convert": convert}
                keys = job_of(model, {"storage": "in"}, target)
                (work / "job.yaml").write_text(json.dumps(keys))
                commands.run("reshard-compile", work / "job.yaml", "-o", work / "p.rplan")
                shutil.rmtree(work / "out", ignore_errors=True)
                return commands.run(
                    "reshard-exec", work / "p.rplan", f"--target={work / 'out'}", *more, code=code
                ).stderr

            for dtype, stored, most in (("fp16", "F16", 65504), ("fp8_e5m2", "F8_E5M2", 57344)):
                for more in ((), ("--check",)):
                    error = execute(3, dtype, "rne", *more)
                    self.assertIn(
                        f"param 'layers.1.w': found a value beyond the largest of the dtype, {most}; "
                        "expected a "
                        "dtype that holds it, or 'convert: saturate' (the largest value) or 'convert: inf' "
                        "(infinite) in the target of the job; of reshard-convert, --convert=saturate or inf",
                        error,
                    )
                    self.assertNotIn("layers.0.w", error)
                    self.assertFalse((work / "out").exists())
                for rule, rounded in rules.items():
                    execute(0, dtype, rule, "--check")
                    for key, (found, data) in tensors(work / "out/model.safetensors").items():
                        with np.errstate(over="ignore", invalid="ignore"):
                            expected = rounded(np.array(values[key], np.float32), most).astype(TYPES[stored])
                        self.assertEqual(found, stored)
                        np.testing.assert_array_equal(
                            np.frombuffer(data, TYPES[stored]).astype(np.float32), expected.astype(np.float32)
                        )
            error = execute(3, "fp8_e4m3", "rne")  # has no infinity
            for key in ("fine", "layers.1.w"):
                self.assertIn(f"param '{key}'", error)
            self.assertNotIn("inf", error)
            execute(0, "bf16", "rne", "--check")  # the same values fit


if __name__ == "__main__":
    unittest.main()

# SPDX-License-Identifier: Apache-2.0
"""Quantization during a run: random jobs with and without `quantize` (docs/yaml.md, section 12), whose target files
must equal NumPy's result for the same values, bit for bit; quantized targets as sources of further jobs; over MPI;
refusals; values that are not finite. RESHARD_BIN: the folder of the commands; needs numpy and ml_dtypes. To run a
part: quantize_test.py Quantize.test_refusals; RESHARD_SEEDS=3,17 selects jobs; RESHARD_KEEP=DIR keeps the files of
failed jobs."""

import itertools
import json
import os
import re
import shutil
import tempfile
import traceback
import unittest
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

import mpi_test
import quantize_jobs as jobs
import quantize_reference as reference
import safetensors_io
from commands import job_of, mpirun
from fake_backend import PROGRAM
from oracle import ITEM
from quantize_work import BIN, Refused, Values, Work, Wrong, least, run

FULL = "RESHARD_FULL" in os.environ
JOBS = 504 if FULL else 84  # at most; the quick mode stops when each kind was compared
QUICK = not FULL and "RESHARD_SEEDS" not in os.environ
SEEDS = (
    [int(seed) for seed in os.environ["RESHARD_SEEDS"].split(",")]
    if "RESHARD_SEEDS" in os.environ
    else range(1, 12 * JOBS)
)
SHARED = "/dev/shm" if os.path.isdir("/dev/shm") else None
VARIANTS = {str(reference.Quantize.read(jobs.quantize_dict(variant))) for variant in jobs.VARIANTS}
# The quick mode has each format on both sides: random jobs need long until they have each variant
# and each pair of formats.
KINDS = {text for one in jobs.FORMATS for text in (f"from {one}", f"{one} copied")}
if FULL:
    KINDS |= VARIANTS | {f"{one} to {other}" for one in jobs.FORMATS for other in jobs.FORMATS if one != other}

REFUSED = "columns that do not match the format are refused"  # a reason why a job is skipped


def attempt(work, seed):
    """Runs one random job from files; every third job is one of the property test."""
    own = seed % 3 != 0
    node, weights = jobs.own(work.rng) if own else (jobs.generated(work.rng, seed), None)
    job = work.plain(node)
    quantized = work.add_quantize(node, own)
    work.narrow(quantized, "quantized")
    work.compile_quantized("quantized", quantized)
    after = work.oracle("quantized")
    params = [
        placed
        for endpoint in after.endpoints[1:]
        for mesh_rank in reference.params_of(endpoint)
        for placed in mesh_rank.values()
    ]
    if not any(placed.quantize and placed.held.labels.size for placed in params):
        raise Refused("has nothing to quantize")
    values = work.sources(job)
    for name in ("plain", "quantized"):
        work.move(name, "source", name)
    work.prove("quantized")
    work.compare("quantized", after, values, against="plain")
    if own:
        work.chain(quantized, after, weights)


def try_job(seed):
    """Returns the counts of comparisons, why the job is skipped, and an error text."""
    with tempfile.TemporaryDirectory(dir=SHARED) as name, np.errstate(all="ignore"):
        work = Work(Path(name), seed)
        try:
            attempt(work, seed)
        except Refused as refused:
            return work.counts, str(refused), ""
        except Exception as wrong:  # any exception: report the seed with it
            if "RESHARD_KEEP" in os.environ:
                shutil.copytree(name, Path(os.environ["RESHARD_KEEP"]) / f"job-{seed}", dirs_exist_ok=True)
            return work.counts, "", f"seed {seed}: {wrong if isinstance(wrong, Wrong) else traceback.format_exc()}"
        return work.counts, "", ""


def by_hand(random, dtype, what, shape):
    """A matrix whose rows have edge cases: zeros, extreme values, ties, and values that are not finite."""
    limits = reference.formats.DTYPES[reference.WIDE[dtype]]
    code = lambda bits: np.array([bits], f"u{limits.itemsize}").view(limits)[0]
    tiny, huge = code(1), code({"fp32": 0x7F7FFFFF, "bf16": 0x7F7F, "fp16": 0x7BFF}[dtype])
    matrix = (random.normal(0, 1, shape) * np.exp2(random.integers(-9, 9, (shape[0], 1)))).astype(limits)
    if what == "zero":
        matrix[:], matrix[:, ::3] = 0, -0.0
        return matrix
    matrix[0:3] = 0
    matrix[3:6], matrix[5, ::5] = tiny, 0
    matrix[6] = (np.arange(256) * tiny.astype(np.float32)).astype(limits)
    for row, edge in enumerate(
        (448, 448 * (1 + 2**-7), 448 * (1 - 2**-8), 224, 6, 5, 3.5, 2.5, 0.25), 7
    ):  # the largest of each block
        matrix[row], matrix[row, ::16] = random.normal(0, 0.01, 256).astype(limits), edge
    matrix[16] = np.resize(np.float32([6, 0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5, 0.5]), 256).astype(
        limits
    )  # halfway between two E2M1 values
    matrix[17] = np.resize(np.float32([448, 17, 19, -21, 2**-10, 3 * 2**-10, -(2**-9)]), 256).astype(
        limits
    )  # halfway between two E4M3 values
    if what == "strange":
        matrix[20, 40], matrix[21, 70], matrix[22, 200], matrix[150, 7] = np.nan, np.inf, -np.inf, -np.nan
        matrix[23], matrix[24, ::2] = huge, -huge
        matrix[128:256, 128:256] = 0
    return matrix


def model(**tensors):
    return {
        "dtype": "bf16",
        "tensors": {name: {"shape": shape} if isinstance(shape, list) else shape for name, shape in tensors.items()},
    }


class Quantize(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(dir=SHARED)
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.work = Work(self.folder, 0)

    def test_random_jobs(self):
        total, left, problems, done = Counter(), Counter(), [], 0
        with ProcessPoolExecutor(2) as pool:  # most of a job's time is NumPy and the oracle
            for counts, reason, problem in pool.map(try_job, SEEDS):
                done += not reason and not problem
                total += counts
                left[reason] += bool(reason)
                problems += [problem] * bool(problem)
                if done == JOBS or len(problems) == 5 or (QUICK and total.keys() >= KINDS and left[REFUSED] > 0):
                    pool.shutdown(cancel_futures=True)
                    break
        print(f"{done} jobs; skipped: {dict(+left)}")
        for kind, count in sorted(total.items()):
            print(f"  {kind:<30}{count:>8}")
        self.assertEqual(problems, [], "\n".join(problems))
        if "RESHARD_SEEDS" not in os.environ:
            if not QUICK:
                self.assertEqual(done, JOBS)
            self.assertEqual(KINDS - total.keys(), set(), "never compared")
            self.assertGreater(left[REFUSED], 0)

    def mpi(self, name, world):
        """Keeps a plan for tearDown(), which runs it over MPI: the launches take longer than the runs."""
        folder = self.folder / "mpi" / str(world)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.work.path(f"{name}.rplan"), folder / f"{len(list(folder.iterdir()))}.rplan")

    def tearDown(self):
        for folder in sorted(self.folder.glob("mpi/*")):
            for options in ((), ("--no-local-shortcut",)):
                done = mpirun(
                    int(folder.name), BIN / "conformance", folder, "--transport=mpi", "--timeout=60", *options
                )
                self.assertRegex(
                    done.stdout, rf"(?m)^{len(list(folder.iterdir()))} plans, [1-9]\d* bytes right, 0 wrong$"
                )

    def compiled(self, node, name="job", code=0):
        """Compiles a job that must be accepted and returns its report."""
        done = self.work.compile(name, node, f"--report={self.work.path('report')}")
        self.assertEqual(done.returncode, code, done.stderr)
        self.stderr = done.stderr
        return json.loads(self.work.path("report").read_text()) if code == 0 else None

    def test_a_rank_whose_shards_are_empty(self):
        """A rank with empty shards contributes 0 to the amax."""
        for quantize in ({"format": "nvfp4"}, {"format": "nvfp4", "by": "sender"}, {"format": "mxfp8", "by": "sender"}):
            node = job_of(
                model(w={"shape": [32, 128], "shard": {"0": {"axis": "tp", "unit": 32, "scheme": "chunk"}}}),
                {"mesh": {"tp": 2}},
                {"mesh": {"tp": 2}, "quantize": quantize},
            )
            self.compiled(node)
            for program in ([BIN / "reshard-exec"], [PROGRAM, "--device=cuda"]):
                done = run(*program, self.work.path("job.rplan"), "--synthesize", "--check")
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_elements_that_the_source_does_not_hold(self):
        """Tensor scales depend only on elements that the source holds: the run, --verify, --check and NumPy agree."""
        node = job_of(
            model(w={"shape": [8, 16], "shard": {"0": {"axis": "tp", "map": [[0], [1]], "unit": 2}}}),
            {"mesh": {"tp": 2}},
            {"mesh": {"tp": 2}, "quantize": "nvfp4"},
        )
        self.assertEqual(self.work.compile("job", node, "--allow=gap").returncode, 0)
        for seed in range(41):
            self.work.execute("job", "--synthesize", "--check", f"--seed={seed}")

    def test_random_gaps(self):
        """Sources with elements in several params, on several mesh ranks, or not at all."""
        done = Counter()
        for seed in range(2000 if FULL else 150):
            with tempfile.TemporaryDirectory(dir=SHARED) as name, self.subTest(seed=seed):
                work = Work(Path(name), seed)
                work.rng.seed(seed)
                node = jobs.gaps(work.rng)
                compiled = work.compile("job", node, "--allow=gap")
                job = work.oracle("job")
                values, held = work.draw_held(job)
                wanted = [
                    one.labels
                    for endpoint in job.endpoints[1:]
                    for mesh_rank in range(endpoint.mesh_ranks)
                    for one in endpoint.params(mesh_rank).values()
                ]
                if not all(held[labels].all() for labels in wanted):
                    self.assertEqual(compiled.returncode, 2, compiled.stderr)
                    self.assertIn("source holds", compiled.stderr)
                    done["refused"] += 1
                    continue
                self.assertEqual(compiled.returncode, 0, compiled.stderr)
                work.prove("job")
                # Files of mesh ranks without authority differ here, which --check does not know.
                work.execute(
                    "job",
                    f"--source={work.path('source')}",
                    f"--target={work.path('target')}",
                    *(() if "authority" in node["source"] else ("--check",)),
                )
                work.compare("target", job, values)
                done["gaps" if "part of tensor" in compiled.stderr else "whole"] += 1
                done["several params"] += len(node["model"]["layouts"]["s"]["params"]) > 2
                done.update(work.counts)
        print(dict(done))
        self.assertGreater(min(done["gaps"], done["whole"], done["several params"], done["nvfp4 by default"]), 10, done)

    def test_tied_embedding(self):
        """Two source params hold one tensor, with the same or another sharding, on the first and the last stage."""
        for cut in ({"0": "tp"}, {"1": "tp"}):
            for stages in (1, 2):
                layouts = {
                    "train": {
                        "place": {"layer": "pp"},
                        "params": {
                            "embed": {"holds": "embed", "shard": {"0": "tp"}, "at": {"pp": "first"}},
                            "head": {"holds": "head", "shard": cut, "at": {"pp": "last"}},
                            "l.{layer}.w": {"holds": "l.{layer}.w", "shard": {"0": "tp"}},
                        },
                    },
                    "serve": {"params": "same", "shard": {"*": {"0": "tp"}}},
                }
                tensors = model(embed=[64, 96], **{"l.{layer}.w": [96, 96]})
                tensors["tensors"]["head"] = {"tied": "embed"}
                node = job_of(
                    tensors | {"index": {"layer": 2}, "layouts": layouts},
                    {"layout": "train", "mesh": {"tp": 2, "pp": stages}},
                    {"layout": "serve", "mesh": {"tp": 2}, "ranks": "4..5", "quantize": "nvfp4"},
                )
                with self.subTest(cut=cut, stages=stages), tempfile.TemporaryDirectory(dir=SHARED) as name:
                    self.work = Work(Path(name), 7)
                    world = self.compiled(node)["world"]
                    self.work.prove("job")
                    job = self.work.oracle("job")
                    values, _ = self.work.draw_held(job)
                    self.work.move("job", "source", "target")
                    self.work.compare("target", job, values)
                    self.mpi("job", world)

    def test_tied_sources_have_one_tensor_scale(self):
        """Source params that hold the same matrices, alone, stacked, in a pack and in another order of variables, have
        equal synthetic values."""

        def param(content, **keys):
            return (content if isinstance(content, dict) else {"holds": content}) | {"quantize": "nvfp4"} | keys

        w, pack = "w.{l}.{e}", {"concat": ["w.{l}.{e}", "x.{l}.{e}"], "cut": "joined"}
        alone, halves = {"w.{l}.{e}": param(w)}, {"p.{l}.{e}": param(pack, shard={"0": "tp"})}
        both = [{"index": "l", "dim": 1}, {"index": "e", "dim": 0}]
        for first, other in (
            (alone, {"t.{e}.{l}": param("t.{e}.{l}")}),
            (alone, {"s.{l}": param(w, stack="e")}),
            (alone, {"s": param(w, stack=both)}),
            (halves, {"s.{l}": param(pack, stack="e")}),
            (halves, {"s.{e}": param(pack, stack="l", shard={"1": "tp"})}),
        ):
            layouts = {"s": {"params": first | other}, "t": {"params": {"w.{l}.{e}": {"holds": w}}}}
            node = job_of(
                model(**{w: [16, 32], "x.{l}.{e}": [16, 32], "t.{e}.{l}": {"tied": w}})
                | {"index": {"l": 2, "e": 3}, "layouts": layouts},
                {"layout": "s", "mesh": {"tp": 2}},
                {"layout": "t", "mesh": {}},
            )
            with self.subTest(first=list(first), other=other):
                self.compiled(node)
                self.work.prove("job")
                self.work.execute("job", "--synthesize", "--check")

    def test_tied_sources_with_other_values(self):
        """--check does not say that blocks differ where the values in the files do."""
        layouts = {
            "s": {"params": {name: {"holds": name, "quantize": "mxfp8"} for name in "we"}},
            "t": {"params": {"w": {"holds": "w"}}},
        }
        self.compiled(
            job_of(
                model(w=[32, 64], e={"tied": "w"}) | {"layouts": layouts},
                {"layout": "s", "storage": "in"},
                {"layout": "t", "storage": "out"},
            )
        )
        self.work.path("in").mkdir()
        safetensors_io.write(
            self.work.path("in") / "model.safetensors",
            {
                name + part: (dtype, [32, columns], bytes([code]) * 32 * columns)
                for name, code in (("w", 48), ("e", 49))
                for part, dtype, columns, code in (("", "fp8_e4m3", 64, code), ("_scale", "u8", 2, 127))
            },
        )
        done = run(BIN / "reshard-exec", self.work.path("job.rplan"), f"--target={self.work.path('out')}", "--check")
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn(
            "give two different values for element 0: they quantize it in different formats or blocks, or "
            "the source's values differ",
            done.stdout,
        )

    def test_tied_replicas(self):
        """--check-replicas compares tied source params that have the same blocks, whether the target takes codes or
        values, and says it of those that do not."""
        values = {
            (name, part): (dtype, [32, columns], bytearray([code]) * 32 * columns)
            for name in "we"
            for part, dtype, columns, code in (("", "fp8_e4m3", 64, 48), ("_scale", "u8", 2, 127))
        }
        self.work.path("in").mkdir()

        def execute(code, changed=None, without=(), **forms):
            """The output of the run, with a byte of a param changed. forms: what `quantize` of each param states."""
            node = job_of(
                model(w=[32, 64], e={"tied": "w"}), {"layout": "s", "storage": "in"}, {"layout": "t", "storage": "out"}
            )
            node["model"]["layouts"] = {
                "s": {"params": {name: {"holds": name, "quantize": forms.get(name, "mxfp8")} for name in "we"}},
                "t": {"params": {"w": {"holds": "w"} | ({"quantize": forms["t"]} if "t" in forms else {})}},
            }
            self.compiled(node)
            stored = {
                name + part: (dtype, shape, bytes(data))
                for (name, part), (dtype, shape, data) in values.items()
                if name not in without
            }
            if changed:
                dtype, shape, data = stored[changed]
                stored[changed] = (dtype, shape, data[:5] + bytes([data[5] ^ 1]) + data[6:])
            safetensors_io.write(self.work.path("in") / "model.safetensors", stored)
            shutil.rmtree(self.work.path("out"), ignore_errors=True)
            done = run(
                BIN / "reshard-exec",
                self.work.path("job.rplan"),
                f"--target={self.work.path('out')}",
                "--check-replicas",
            )
            self.assertEqual(done.returncode, code, done.stdout + done.stderr)
            return done.stdout + done.stderr

        for target in ({}, {"t": "mxfp8"}):
            with self.subTest(target=target):
                text = execute(0, **target)
                self.assertIn("compared, all equal", text)
                self.assertNotIn("not compared", text)
                for changed in ("w", "e", "w_scale", "e_scale"):
                    self.assertIn("differs from", execute(1, changed, **target))
                self.assertNotIn("all equal", execute(0, without="e", **target))
        self.assertIn("not compared with each other", execute(0, without="e", e="block_fp8"))

    def test_missing_shapes(self):
        """The shapes beside the codes of int4 are not read and may be missing, in every format of files."""
        random = np.random.default_rng(3)
        tensors = {
            f"l.{i}.w_{part}": (dtype, shape)
            for i in range(2)
            for part, dtype, shape in (("packed", "i32", [8, 8]), ("scale", "bf16", [8, 2]), ("shape", "i64", [2]))
        }
        layouts = {
            "s": {
                "params": {
                    "l.{layer}.w": {"holds": "l.{layer}.w", "quantize": {"format": "int4", "shape": "{name}_shape"}}
                }
            },
            "t": {"params": "same"},
        }
        expected = {}
        for missing in ([], ["l.1.w_shape"], ["l.0.w_shape", "l.1.w_shape"]):
            stored = {name: entry for name, entry in tensors.items() if name not in missing}
            for form in ("safetensors", "dcp", "megatron", "torch-save", "dcp-safetensors"):
                with self.subTest(form=form, missing=missing):
                    folder = self.work.path(f"{form}-{len(missing)}")
                    copied = job_of(
                        {
                            "tensors": {
                                name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in stored.items()
                            }
                        },
                        {"storage": "in"},
                        {"storage": {"folder": "out", "format": form}},
                    )
                    self.work.path("in").mkdir(exist_ok=True)
                    for name, (dtype, shape) in tensors.items():
                        if name not in expected:
                            expected[name] = random.integers(
                                0, 127, ITEM[dtype] * int(np.prod(shape)), np.uint8
                            ).tobytes()
                    safetensors_io.write(
                        self.work.path("in") / "model.safetensors",
                        {name: (*entry, expected[name]) for name, entry in stored.items()},
                    )
                    self.compiled(copied)
                    self.work.execute("job", f"--target={folder}")
                    self.compiled(
                        job_of(
                            model(**{"l.{layer}.w": [8, 64]}) | {"index": {"layer": 2}, "layouts": layouts},
                            {
                                "layout": "s",
                                "storage": {
                                    "folder": str(folder / "model.pt" if form == "torch-save" else folder),
                                    "format": form,
                                },
                            },
                            {"layout": "t", "storage": "values"},
                        ),
                        "values",
                    )
                    # common.pt of megatron
                    self.work.execute("values", f"--target={folder}-values", "--check", "--allow=extra")
                    found = safetensors_io.read(Path(f"{folder}-values") / "model.safetensors")
                    self.assertEqual(found, expected.setdefault("values", found))

    def test_stacks(self):
        """Experts stacked along any dimension of a param, on either side: the matrices of a target are its last two
        dimensions."""
        for source, target in itertools.product((None, 0, 1, 2), (0, 1, 2)):
            shard = lambda stack: {"0" if stack != 0 else "1": "tp"}
            held = (
                {"w": {"holds": "w.{e}", "stack": {"index": "e", "dim": source}, "shard": shard(source)}}
                if source is not None
                else {"w.{e}": {"holds": "w.{e}", "shard": {"1": "tp"}}}
            )
            layouts = {
                "train": {"place": {"e": "ep"}, "params": held},
                "serve": {
                    "place": {"e": {"axis": "ep", "map": [[3, *range(4, 16)], [0, 1, 2]]}} if target == 1 else {},
                    "params": {"w": {"holds": "w.{e}", "stack": {"index": "e", "dim": target}, "shard": shard(target)}},
                },
            }
            node = job_of(
                model(**{"w.{e}": [8, 32]}) | {"index": {"e": 16}, "layouts": layouts},
                {"layout": "train", "mesh": {"tp": 2, "ep": 2}},
                {"layout": "serve", "mesh": {"tp": 2} | ({"ep": 2} if target == 1 else {}), "quantize": "nvfp4"},
            )
            with self.subTest(source=source, target=target), tempfile.TemporaryDirectory(dir=SHARED) as name:
                self.work = Work(Path(name), 3)
                self.compiled(node)
                self.work.prove("job")
                job = self.work.oracle("job")
                values, _ = self.work.draw_held(job)
                self.work.move("job", "source", "target")
                self.work.compare("target", job, values)
                if target == 1 and source in (None, 2):
                    self.mpi("job", 4)

    def test_over_mpi(self):
        """Every kind of schedule, and every format; in full every kind with every format. If the staging limit is too
        low, the job is repeated with the limit that the error names."""
        for kind, (source, target, options) in enumerate(mpi_test.KINDS):
            odd = kind % 2
            variants = (
                ("mxfp8", ("", "sender")[odd], "swizzled"),
                ("block_fp8", ("", "receiver")[odd], ""),
                ("nvfp4", "", ("", "swizzled")[odd]),
                ("block_fp8_ue8m0", ("", "receiver")[odd], ("packed", "")[odd]),
                ("mxfp4", "", ("", "swizzled")[odd]),
                ("int4", "", ""),
            )
            for variant in (
                variants if FULL else [variants[number % len(variants)] for number in (2 * kind, 2 * kind + 1)]
            ):
                with self.subTest(source=source, target=target, options=options, variant=variant):
                    node = job_of(
                        mpi_test.WEIGHTS,
                        source,
                        target | {"quantize": jobs.quantize_dict(variant)},
                        options=dict(options),
                    )
                    self.work.compile_quantized("job", node)
                    self.mpi("job", self.compiled(node)["world"])

    def test_chunks_that_begin_inside_an_element(self):
        """Three bytes before the elements, so that each chunk of the message begins in the middle of one."""
        tensors = {"a": {"shape": [3], "dtype": "i8"}, "w": [128, 256], "z": {"shape": [5], "dtype": "i8"}}
        params = {name: {"holds": name} for name in tensors}
        for form in jobs.FORMATS if FULL else jobs.FORMATS[:2]:
            with self.subTest(form=form):
                layouts = {"s": {"params": params | {"w": {"holds": "w", "quantize": form}}}, "t": {"params": "same"}}
                node = job_of(
                    {"dtype": "bf16", "tensors": tensors, "layouts": layouts},
                    {"layout": "s", "mesh": {}},
                    {"layout": "t", "mesh": {}, "ranks": [1]},
                    options={"staging": "4KiB"},
                )
                self.mpi("job", self.compiled(node)["world"])

    def test_random_jobs_over_mpi(self):
        done = 0
        for seed in range(1000, 1100):
            work = self.work
            work.seed = seed
            work.rng.seed(seed)
            node = jobs.own(work.rng)[0]
            if "storage" in json.dumps(node):
                continue
            try:
                work.plain(node)
                quantized = work.add_quantize(node, True)
                work.narrow(quantized, "quantized", choose=False)
                work.compile_quantized("quantized", quantized)
            except Refused:
                continue
            with self.subTest(seed=seed):
                self.mpi("quantized", self.compiled(quantized, "quantized")["world"])
            done += 1
            if done == (40 if FULL else 4):
                return
        self.fail("too few jobs")

    # -------------------------------------------------------------------------------------------------------- refusals

    def refused(self, node, *texts, name="job"):
        self.compiled(node, name, code=2)
        self.assertRegex(self.stderr, r"job\.yaml:\d+:\d+: error: ")
        for text in texts:
            self.assertRegex(self.stderr, text)

    def test_refusals(self):
        serve = lambda param: {
            "model": model(
                w=[64, 64], n=[64], i={"shape": [64, 64], "dtype": "i32"}, d={"shape": [64, 64], "dtype": "fp64"}
            )
            | {"layouts": {"a": {"params": "same"}, "b": {"params": param}}},
            "source": {"layout": "a", "mesh": {}},
            "target": {"layout": "b", "mesh": {}},
        }
        plain = lambda columns, quantize, **target: {
            "model": model(w={"shape": [64, columns], "shard": {"1": "tp"}}),
            "source": {"mesh": {}},
            "target": {"mesh": {"tp": 2}, "quantize": quantize} | target,
        }
        cases = [
            ("columns of mxfp8", plain(96, "mxfp8"), (r"'w'", r"\b48\b", r"\b32\b")),
            ("columns of nvfp4", plain(48, "nvfp4"), (r"'w'", r"\b24\b", r"\b16\b")),
            ("columns of mxfp4", plain(96, "mxfp4"), (r"'w'", r"\b48\b", r"\b32\b")),
            ("columns of int4", plain(96, "int4"), (r"'w'", r"\b48\b", r"\b32\b")),
            (
                "columns of a source in int4",
                {"model": model(w=[64, 48]), "source": {"mesh": {}, "quantize": "int4"}, "target": {"mesh": {}}},
                (r"'w'", r"\b48\b", r"\b32\b"),
            ),
            (
                "swizzled int4",
                plain(64, {"format": "int4", "scale_layout": "swizzled"}),
                (r"int4", r"swizzled", r"'plain'"),
            ),
            (
                "rows of codes",
                plain(64, {"format": "nvfp4", "codes_shape": "blocks"}),
                (r"nvfp4", r"'codes_shape: blocks'", r"mxfp4"),
            ),
            (
                "codes_shape",
                plain(64, {"format": "mxfp4", "codes_shape": "block"}),
                (r"'block'", r"did you mean 'blocks'"),
            ),
            ("codes of an endpoint", plain(64, {"format": "mxfp4", "codes": "c"}), (r"'codes'", r"'\{name\}'")),
            (
                "the shape of a target",
                plain(64, {"format": "int4", "shape": "{name}_shape"}),
                (r"'w'", r"'shape'", r"'w_shape'"),
            ),
            ("one dimension", serve({"n": {"holds": "n", "quantize": "mxfp8"}}), (r"'n'", r"dimension")),
            ("integers", serve({"i": {"holds": "i", "quantize": "mxfp8"}}), (r"'i'", r"i32")),
            ("fp64", serve({"d": {"holds": "d", "quantize": "block_fp8"}}), (r"'d'", r"fp64")),
            ("format", plain(64, "mxfp9"), (r"mxfp9", r"did you mean 'mxfp8'")),
            ("format in a map", plain(64, {"format": "nvfp5"}), (r"nvfp5", r"did you mean 'nvfp4'")),
            ("no format", plain(64, {"by": "sender"}), (r"'format'",)),
            ("key", plain(64, {"format": "mxfp8", "scales": "{name}_s"}), (r"'scales'", r"did you mean 'scale'")),
            ("by", plain(64, {"format": "mxfp8", "by": "sendr"}), (r"sendr", r"sender")),
            ("scale_layout", plain(64, {"format": "mxfp8", "scale_layout": "swizled"}), (r"swizled", r"swizzled")),
            (
                "packed rows",
                plain(64, {"format": "mxfp8", "scale_layout": "packed"}),
                (r"mxfp8", r"packed", r"'plain' or 'swizzled'"),
            ),
            (
                "swizzled blocks",
                plain(64, {"format": "block_fp8", "scale_layout": "swizzled"}),
                (r"swizzled|scale_layout", r"block_fp8"),
            ),
            ("only", plain(64, {"format": "mxfp8", "only": "*.experts.*"}), (r"\*\.experts\.\*", r"only")),
            ("ignore", plain(64, {"format": "mxfp8", "ignore": ["w", "*.gate"]}), (r"\*\.gate", r"ignore")),
            (
                "dtype beside it",
                serve({"w": {"holds": "w", "quantize": "mxfp8", "dtype": "fp8_e4m3", "convert": "rne"}}),
                (r"'?dtype'?", r"'?quantize'?"),
            ),
            (
                "a layout",
                {
                    "model": model(w=[64, 64]) | {"layouts": {"a": {"params": "same", "quantize": "mxfp8"}}},
                    "source": {"layout": "a", "mesh": {}},
                    "target": {"mesh": {}, "layout": "a"},
                },
                (r"not supported in this version",),
            ),
            (
                "one name twice",
                serve({"w": {"holds": "w", "quantize": {"format": "mxfp8", "scale": "n"}}, "n": {"holds": "n"}}),
                (r"'n'",),
            ),
            *(
                (
                    f"{key} {name}",
                    {
                        "model": model(**{"w.{layer}": [64, 64]})
                        | {
                            "index": {"layer": 1},
                            "layouts": {
                                "a": {
                                    "params": {
                                        "w.{layer}": {"holds": "w.{layer}", "quantize": {"format": form, key: name}}
                                    }
                                },
                                "b": {"params": "same"},
                            },
                        },
                        "source": {"layout": "a", "mesh": {}},
                        "target": {"layout": "b", "mesh": {}},
                    },
                    (
                        rf"'{key}' of 'quantize' is '{re.escape(name)}', which has {{name}} {times}",
                        r"param 'w.\{layer\}' has index variables, expected \{name\} once",
                    ),
                )
                for form, key in (("mxfp8", "scale"), ("nvfp4", "tensor_scale"), ("mxfp8", "codes"), ("int4", "shape"))
                for name, times in (("{name}.{name}", "2 times"), ("s", "not at all"))
            ),
            ("scales named as codes", plain(64, {"format": "mxfp8", "scale": "{name}"}), (r"'w'",)),
            (
                "a source",
                {"model": model(w=[64, 48]), "source": {"mesh": {}, "quantize": "mxfp8"}, "target": {"mesh": {}}},
                (r"'w'", r"\b48\b", r"\b32\b"),
            ),
        ]
        for what, node, texts in cases:
            with self.subTest(what):
                self.refused({"version": 1} | node, *texts)
        for what, node in (
            ("nvfp4 of 16", plain(32, "nvfp4")),
            ("a name twice, without a variable", plain(64, {"format": "mxfp8", "scale": "{name}.{name}"})),
            ("none", serve({"w": {"holds": "w", "quantize": "none"}})),
            (
                "an endpoint's is for matrices of floats",
                {
                    "model": model(w=[64, 64], n=[64], i={"shape": [7, 5], "dtype": "i32"}),
                    "source": {"mesh": {}},
                    "target": {"mesh": {}, "quantize": "mxfp8"},
                },
            ),
        ):
            with self.subTest(what):
                self.compiled({"version": 1} | node)
                self.work.prove("job")

    def test_staging(self):
        """The error for a staging limit that is too low names the least limit. That limit works, and one byte less does
        not."""
        for form in jobs.FORMATS:
            node = job_of(
                model(w={"shape": [512, 768], "shard": {"1": "tp"}}),
                {"mesh": {"tp": 6}},
                {"mesh": {"tp": 2}, "ranks": "6..7", "quantize": {"format": form, "by": "receiver"}},
            )
            for limit in (64, 4096, 1 << 16):
                with self.subTest(format=form, limit=limit):
                    node["options"] = {"staging": limit}
                    done = self.work.compile("job", node)
                    if done.returncode == 0:
                        self.assertEqual(reference.BLOCK[form][0], 1)  # blocks of one row need no staging here
                        self.work.prove("job")
                        continue
                    self.assertEqual(done.returncode, 2, done.stderr)
                    self.assertIn("staging", done.stderr)
                    needed = least(done.stderr, limit)
                    self.assertIsNotNone(needed, done.stderr)
                    node["options"]["staging"] = needed
                    self.compiled(node)
                    self.work.prove("job")
                    node["options"]["staging"] = needed - 1
                    self.compiled(node, code=2)

    # --------------------------------------------------------------------------------------------------------- senders

    def test_senders(self):
        """Quantizing on the sender halves the bytes sent; if the sender cannot quantize, a warning names the param."""

        def job(source, target, **quantize):
            return job_of(
                model(**{"layer.w": {"shape": [512, 768], "shard": {"0": "rows", "1": "columns"}}}),
                {"mesh": source},
                {"mesh": target, "ranks": "8..9", "quantize": quantize},
            )

        scales = {"mxfp8": 512 * 768 // 32, "block_fp8": 4 * 6 * 4, "block_fp8_ue8m0": 4 * 6}
        for form in scales:
            for rows, columns in ((2, 1), (1, 2), (1, 3), (4, 1), (1, 8), (8, 1)):
                source, fits = (
                    {"rows": rows, "columns": columns},
                    form == "mxfp8" or max(rows, columns) < 8,
                )  # 96 columns, 64 rows
                with self.subTest(format=form, source=source):
                    before = self.compiled(job(source, {"rows": 2}, format=form, by="receiver"))["bytes"]["remote"]
                    self.assertEqual(before, 2 * 512 * 768)
                    after = self.compiled(job(source, {"rows": 2}, format=form, by="sender"))["bytes"]["remote"]
                    self.work.prove("job")
                    if fits:
                        self.assertNotIn("warning", self.stderr)
                        self.assertEqual(after, 512 * 768 + scales[form])
                    else:
                        self.assertRegex(self.stderr, r"warning: .*layer\.w")
                        self.assertEqual(after, before)
        default = self.compiled(job({"rows": 2, "columns": 1}, {"rows": 2}, format="block_fp8"))["bytes"]["remote"]
        self.assertLess(default, before)
        self.compiled(job({"rows": 8, "columns": 1}, {"rows": 2}, format="block_fp8"))
        self.assertNotIn("warning", self.stderr)  # `by: sender` was not requested

    # ------------------------------------------------------------------------------------------------ values by hand

    def test_values(self):
        """Blocks of zeros, of the smallest and largest values, at the edges between scales, and with values that are
        not finite."""
        tensors = {
            f"{dtype}.{what}": {"shape": [256, 256], "dtype": dtype}
            for dtype in reference.WIDE
            for what in ("finite", "strange")
        }
        node = job_of(
            {
                "tensors": tensors | {"bf16.zero": {"shape": [130, 64], "dtype": "bf16"}},
                "layouts": {
                    "rows": {"params": "same", "shard": {"*.zero": {}, "*": {"0": "tp"}}},
                    "columns": {"params": "same", "shard": {"*.zero": {}, "*": {"1": "tp"}}},
                },
            },
            {"layout": "rows", "mesh": {"tp": 4}},
            [
                {"layout": "columns", "mesh": {"tp": 2}, "quantize": jobs.quantize_dict(variant)}
                for variant in jobs.VARIANTS
            ],
        )
        work, random = self.work, np.random.default_rng(5)
        work.compile_quantized("quantized", node)
        job = work.oracle("quantized")
        values = Values(job.model.labels)
        with np.errstate(all="ignore"):
            for name, tensor in job.model.tensors.items():
                matrix = by_hand(random, *name.split("."), tensor.shape)
                values.set(tensor.base[()] + np.arange(matrix.size), tensor.dtype, matrix.view(np.uint8))
            work.write_sources(job, values)
            work.move("quantized", "source", "quantized")
            work.compare("quantized", job, values)
        self.assertEqual(set(work.counts), VARIANTS)

    # ------------------------------------------------------------------------------------------------ altered bytes

    def test_altered_replicas(self):
        """--check-replicas finds a byte of codes or scales that differs between two replicas of a quantized source. (No
        option of the commands alters a target between a run and --check.)"""
        axes = {"tp": 2, "dp": 2}
        tensors = model(w={"shape": [128, 128], "shard": {"0": "tp"}})
        for form in jobs.FORMATS:
            first = job_of(tensors, {"mesh": {}}, {"mesh": axes, "quantize": form})
            self.compiled(first)
            folder = self.work.path(form)
            self.work.execute("job", "--synthesize", f"--source={folder}-source")
            self.work.execute("job", f"--source={folder}-source", f"--target={folder}", "--check")
            self.compiled(job_of(tensors, {"mesh": axes, "quantize": form}, {"mesh": {}}), "after")
            done = run(
                BIN / "reshard-exec",
                self.work.path("after.rplan"),
                f"--source={folder}",
                f"--target={folder}-same",
                "--check-replicas",
                "--check",
            )
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            file = folder / "rank-00002.safetensors"
            whole = file.read_bytes()
            length = int.from_bytes(whole[:8], "little")
            for name, entry in json.loads(whole[8 : 8 + length]).items():
                if name != "__metadata__":
                    with self.subTest(format=form, entry=name):
                        at = 8 + length + entry["data_offsets"][1] - 1
                        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
                        done = run(
                            BIN / "reshard-exec",
                            self.work.path("after.rplan"),
                            f"--source={folder}",
                            f"--target={folder}-{name}",
                            "--check-replicas",
                        )
                        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
                        self.assertIsNotNone(re.search(r"\bw", done.stdout + done.stderr))


if __name__ == "__main__":
    unittest.main()

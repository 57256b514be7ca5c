# SPDX-License-Identifier: Apache-2.0
"""One random job of tests/quantize/quantize_test.py in a folder: compiled without and with `quantize`, run from files,
its target files compared with the reference and used as the source of a second job. Raises Wrong on a wrong result."""

from __future__ import annotations

import copy
import json
import random
import re
import subprocess
from collections import Counter
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

import casts_test
import commands
import fake_backend
import quantize_jobs as jobs
import quantize_reference as reference
import run as property_run
import safetensors_io
from commands import job_of
from formats_reference import DTYPES
from oracle import ITEM, Endpoint, Job

BIN = commands.BIN
run = partial(commands.run, code=None)  # callers check the exit code
SIZE = r"(\d+)(?: ?(KiB|MiB|GiB))?"
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def cast_to(dtype: str) -> dict:
    """A cast of random values, some of which are beyond the range."""
    return {"dtype": dtype, "convert": "saturate" if dtype == "fp8_e4m3" else "inf"}


class Wrong(Exception):
    """A result that contradicts docs/yaml.md."""


class Refused(Exception):
    """An invalid job, which is skipped."""


def bytes_of(number: str, unit: str) -> int:
    return int(number) * UNITS.get(unit, 1)


def least(message: str, limit: int) -> int | None:
    """The staging limit that an error names as sufficient: the number after "least", else the largest number above the
    limit."""
    text = " ".join(re.findall(r"error: (.*)", message))
    numbers = re.findall(r"least[^\d]*" + SIZE, text) or re.findall(SIZE, text)
    return max((value for size in numbers if (value := bytes_of(*size)) > limit), default=None)


class Values:
    """The value of each label: its bytes and, for fp32, bf16 and fp16, the number."""

    def __init__(self, labels: int) -> None:
        self.raw, self.wide = np.zeros((labels, 8), np.uint8), np.zeros(labels, np.float32)

    def set(self, labels: np.ndarray, dtype: str, data: np.ndarray) -> None:
        """data: as stored, an array of bytes."""
        labels = labels.reshape(-1)
        self.raw[labels, : ITEM[dtype]] = data.reshape(-1, ITEM[dtype])
        if dtype in reference.WIDE:
            self.wide[labels] = np.frombuffer(data.tobytes(), DTYPES[reference.WIDE[dtype]]).astype(np.float32)
        self.raw[0], self.wide[0] = 0, 0

    def draw(self, job: Job, random: np.random.Generator) -> None:
        """Draws weights whose magnitude differs from part to part; some parts are zero, and sometimes a few values are
        not finite."""
        strange = random.random() < 0.2
        for tensor in job.model.tensors.values():
            for base in tensor.base.values() if tensor.tied is None else ():
                count = prod(tensor.shape)
                labels = np.arange(base, base + count)
                if tensor.dtype not in reference.WIDE:
                    self.set(labels, tensor.dtype, random.integers(0, 256, (count, ITEM[tensor.dtype]), np.uint8))
                    continue
                parts = np.arange(count) // 48
                number = count // 48 + 1
                size = np.exp2(
                    random.integers(-3, 3, number)
                    + np.where(random.random(number) < 0.2, random.integers(-20, 20, number), 0)
                )
                size[random.random(len(size)) < 0.05] = 0
                if strange:
                    size[random.random(len(size)) < 0.05] = 2.0**-126
                    size[random.random(len(size)) < 0.02] = np.nan
                    size[random.random(len(size)) < 0.02] = 2.0**110
                values = (random.normal(0, 1, count) * size[parts]).astype(np.float32)
                values = np.clip(values, -65504, 65504) if tensor.dtype == "fp16" else values
                self.set(
                    labels,
                    tensor.dtype,
                    np.ascontiguousarray(values.astype(DTYPES[reference.WIDE[tensor.dtype]])).view(np.uint8),
                )


def file_of(endpoint: Endpoint, mesh_rank: int) -> str:
    return "model.safetensors" if endpoint.checkpoint else f"rank-{endpoint.ranks[mesh_rank]:05d}.safetensors"


class Work:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed, self.rng, self.counts = folder, seed, random.Random(seed), Counter()

    def path(self, name: str) -> Path:
        return self.folder / name

    # ------------------------------------------------------------------------------------------------------ the
    # commands

    def compile(self, name: str, node: dict, *options: str) -> subprocess.CompletedProcess:
        self.path(f"{name}.yaml").write_text(json.dumps(node, indent=1))
        return run(
            BIN / "reshard-compile",
            self.path(f"{name}.yaml"),
            "-o",
            self.path(f"{name}.rplan"),
            "--verify-each",
            *options,
        )

    def compile_quantized(self, name: str, node: dict) -> None:
        """Compiles a job; half of those with files with Megatron-Core's algorithm. If its staging limit is too low,
        compiles it again with the limit that the error names."""
        targets = node["target"] if isinstance(node["target"], list) else [node["target"]]
        files = any("storage" in endpoint for endpoint in [node["source"], *targets])
        algorithm = ["--algorithm=megatron"] if self.seed % 2 and files else []
        done = self.compile(name, node, *algorithm)
        limit = node.get("options", {}).get("staging")
        if done.returncode == 2 and limit and "staging" in done.stderr:
            needed = least(done.stderr, bytes_of(*re.findall(SIZE, str(limit))[0]))
            if needed is None:
                raise Wrong(f"the error names no sufficient staging limit: {done.stderr}")
            node["options"]["staging"] = needed
            done = self.compile(name, node, *algorithm)
            self.counts["staging raised"] += 1
        if (
            done.returncode == 2
            and any("storage" in target for target in targets)
            and re.search(r"param '[^']+'.*(share|several|storage|write)", done.stderr)
        ):
            raise Refused("blocks of a file are written by several ranks")
        joins = re.search(r"a dimension of tensor '.*' numbers matrices here, but a source param joins it", done.stderr)
        if done.returncode == 2 and joins and '"flat"' in json.dumps(node["model"]["layouts"]):
            raise Refused("matrices with a tensor scale are in a flat buffer of the source")
        if done.returncode != 0:
            raise Wrong(f"exit {done.returncode}: {done.stderr}")

    def execute(self, name: str, *options: object) -> None:
        done = run(BIN / "reshard-exec", self.path(f"{name}.rplan"), *options)
        if done.returncode != 0:
            raise Wrong(
                f"{name}: reshard-exec {' '.join(map(str, options))}: exit {done.returncode}: "
                f"{done.stdout}{done.stderr}"
            )

    def move(self, name: str, source: str, target: str) -> None:
        """Runs a plan from files to files on the CPU and on the simulated GPU, which must write the same files."""
        self.execute(name, f"--source={self.path(source)}", f"--target={self.path(target)}", "--check")
        if problem := fake_backend.difference_on_device(
            self.path(f"{name}.rplan"), self.path(source), self.path(target)
        ):
            raise Wrong(f"{name}: {problem}")

    def prove(self, name: str) -> None:
        self.execute(name, "--synthesize", "--check")
        done = run(BIN / "reshard-inspect", self.path(f"{name}.rplan"), "--verify")
        if done.returncode != 0:
            raise Wrong(f"{name}: reshard-inspect --verify: exit {done.returncode}: {done.stdout}{done.stderr}")

    # ---------------------------------------------------------------------------------------------------------- the
    # jobs

    def oracle(self, name: str) -> Job:
        return Job(str(self.path(f"{name}.yaml")))

    def plain(self, node: dict) -> Job:
        done = self.compile("plain", node)
        if done.returncode != 0:
            raise Refused("invalid job")
        try:
            return self.oracle("plain")
        except property_run.Refused:
            raise Refused("invalid job") from None

    def add_quantize(self, node: dict, own: bool) -> dict:
        """Adds `quantize` to the targets of the job, sometimes to params, and related keys."""
        node, rng = copy.deepcopy(node), self.rng
        for number, target in enumerate(node["target"] if isinstance(node["target"], list) else [node["target"]]):
            target["quantize"] = jobs.quantize_node(rng, jobs.VARIANTS[(self.seed + 7 * number) % len(jobs.VARIANTS)])
            if rng.random() < 0.2 and number > 0:
                target |= cast_to(rng.choice(casts_test.NAMES))
            if own and rng.random() < 0.5:
                params = node["model"]["layouts"][target["layout"]]["params"]
                for name in rng.sample(list(params), 2):
                    if name.endswith(("norm", "ids")):
                        continue
                    choice = rng.random()
                    cast = cast_to(rng.choice(casts_test.NAMES))
                    quantized = {"quantize": jobs.quantize_node(rng, rng.choice(jobs.VARIANTS))}
                    params[name] |= (
                        {"quantize": "none"} if choice < 0.3 else cast if choice < 0.5 and number > 0 else quantized
                    )
        return node

    def narrow(self, node: dict, name: str, choose: bool = True) -> None:
        """Adds `only` and `ignore` so that params which cannot be quantized are excluded; or checks that the compiler
        refuses them by name and number, which ends the attempt."""
        rng = self.rng
        targets = node["target"] if isinstance(node["target"], list) else [node["target"]]
        self.path(f"{name}.yaml").write_text(json.dumps(node))
        for target, endpoint in zip(targets, self.oracle(name).endpoints[1:]):
            if "quantize" not in target:
                continue
            names = list(endpoint.declared())
            quantize = target["quantize"] if isinstance(target["quantize"], dict) else {"format": target["quantize"]}
            if choose and rng.random() < 0.15 and len(names) > 1:
                quantize["only"] = [*rng.sample(names, rng.randint(1, len(names) - 1)), rng.choice(names)[:-1] + "*"]
            if choose and rng.random() < 0.15 and names:
                quantize["ignore"] = rng.choice(names)[:-1] + "?"
            target["quantize"] = quantize if len(quantize) > 1 else target["quantize"]
            endpoint.node["quantize"] = target["quantize"]
            unfit = [
                placed
                for mesh_rank in reference.params_of(endpoint)
                for placed in mesh_rank.values()
                if not placed.fits
            ]
            wrong = [placed for placed in unfit if placed.held.labels.size]
            if wrong and choose and rng.random() < 0.15:
                done = self.compile(name, node)
                named = [placed for placed in wrong if placed.declared in done.stderr or placed.name in done.stderr]
                if done.returncode != 2 or not any(
                    re.search(rf"\b{placed.held.labels.shape[-1]}\b", done.stderr) for placed in named
                ):
                    raise Wrong(
                        f"expected a refusal of {sorted({(p.declared, p.held.labels.shape) for p in wrong})}, "
                        f"exit {done.returncode}: {done.stderr}"
                    )
                raise Refused("columns that do not match the format are refused")
            for declared in sorted({placed.declared for placed in unfit}):
                param = node["model"]["layouts"].get(target.get("layout"), {}).get("params", {})
                if isinstance(param, dict) and "quantize" in (param.get(declared) or {}):
                    param[declared]["quantize"] = "none"
                    continue
                ignored = quantize.get("ignore", [])
                quantize["ignore"] = [ignored] if isinstance(ignored, str) else ignored
                quantize["ignore"].append(declared)
                target["quantize"] = quantize

    def sources(self, job: Job) -> Values:
        """Writes the source's files: synthesized from either plan (with the quantizing plan, all values are finite), or
        drawn."""
        values, origin, endpoint = (
            Values(job.model.labels),
            self.rng.choice(["plain", "quantized", "drawn", "drawn", "drawn"]),
            job.endpoints[0],
        )
        if origin == "drawn":
            values.draw(job, np.random.default_rng(self.seed))
            self.write_sources(job, values)
            return values
        self.execute(origin, "--synthesize", f"--source={self.path('source')}")
        for mesh_rank in range(endpoint.mesh_ranks):
            if (params := endpoint.params(mesh_rank)) and endpoint.admits(
                endpoint.node.get("authority", {}), mesh_rank
            ):
                files = safetensors_io.read(self.path("source") / file_of(endpoint, mesh_rank))
                for name, one in params.items():
                    values.set(one.labels, one.dtype, np.frombuffer(files[name][2], np.uint8))
        return values

    def draw_held(self, job: Job) -> tuple[Values, np.ndarray]:
        """Writes source files with drawn values. An element that no readable mesh rank holds is zero and has no effect.
        Returns for each label whether a readable mesh rank holds it."""
        values, source = Values(job.model.labels), job.endpoints[0]
        values.draw(job, np.random.default_rng(self.seed))
        self.write_sources(job, values)
        held = np.zeros(job.model.labels, bool)
        held[0] = True
        for mesh_rank in range(source.mesh_ranks):
            if source.admits(source.node.get("authority", {}), mesh_rank):
                for one in source.params(mesh_rank).values():
                    held[one.labels.reshape(-1)] = True
        values.raw[~held], values.wide[~held] = 0, 0
        return values, held

    def write_sources(self, job: Job, values: Values) -> None:
        endpoint = job.endpoints[0]
        self.path("source").mkdir()
        for name, tensors in property_run.folder_of(
            endpoint, [endpoint.params(mesh_rank) for mesh_rank in range(endpoint.mesh_ranks)], values.raw, 0xAB
        ).items():
            safetensors_io.write(self.path("source") / name, tensors)

    def compare(
        self,
        folder: str,
        job: Job,
        values: Values,
        against: str = "",
        passed: tuple[int, reference.Passed, set[str]] | None = None,
    ) -> None:
        """Compares the target files with the reference. against: the folder of the same job without `quantize`. passed:
        the number of the target with the source's `quantize`, that `quantize`, and which of its params must have all
        codes unchanged; other targets may have the same `quantize` by chance."""
        for number, endpoint in enumerate(job.endpoints[1:]):
            role = endpoint.role if len(job.endpoints) > 2 else "."
            for mesh_rank, params in enumerate(reference.params_of(endpoint)):
                if not params:
                    continue
                found = safetensors_io.read(self.path(folder) / role / file_of(endpoint, mesh_rank))
                expected: dict[str, tuple[str, np.ndarray]] = {}
                for name, placed in params.items():
                    where = f"seed {self.seed}, {folder}, {role} place {mesh_rank}"
                    if not placed.quantize:
                        dtype = self.unquantized(endpoint, placed)
                        expected[name] = (dtype, np.zeros(placed.held.labels.shape))
                        before = property_run.elements(placed.held, values.raw, 0)
                        names = [safetensors_io.NAMES[d] for d in (placed.held.dtype, dtype)]
                        if name not in found or not self.alike(names, before, found[name][2]):
                            raise Wrong(f"{where}: '{name}' is not {placed.held.dtype} as {dtype}")
                        if against:
                            plain = safetensors_io.read(self.path(against) / role / file_of(endpoint, mesh_rank))
                            if plain[name][2] != before:
                                raise Wrong(f"{where}: '{name}' is wrong without quantize")
                        continue
                    entries = reference.stored(placed, values.wide)
                    self.shaped(where, entries, found)
                    if passed:
                        entries = self.passed(
                            placed, entries, found, passed[1], passed[0] == number and placed.declared in passed[2]
                        )
                    self.same(where, placed, entries, found)
                    expected |= entries
                    if placed.held.labels.size:
                        self.counts[str(placed.quantize)] += 1
                if {name: (dtype, list(array.shape)) for name, (dtype, array) in expected.items()} != {
                    name: entry[:2] for name, entry in found.items()
                }:
                    raise Wrong(
                        f"{where}: { ({name: entry[:2] for name, entry in found.items()}) }, "
                        f"expected { ({n: (d, a.shape) for n, (d, a) in expected.items()}) }"
                    )

    @staticmethod
    def unquantized(endpoint: Endpoint, placed: reference.LocalParam) -> str:
        """Checks a param that is not quantized and returns its dtype."""
        own = endpoint.declared()[placed.declared].get("dtype")
        return own or (
            endpoint.node.get("dtype", placed.held.dtype)
            if placed.held.dtype in casts_test.NAMES
            else placed.held.dtype
        )

    @staticmethod
    def alike(names: list[str], before: bytes, after: bytes) -> bool:
        """Whether bytes equal those of another dtype after a cast. With the same dtype, any NaN equals any NaN, since
        dequantization produces one."""
        if names[0] != names[1] or names[0] not in ("F32", "BF16", "F16"):
            return casts_test.same((names[0], before), (names[1], after), "inf")  # an overflow ends the run
        one, other = (np.frombuffer(data, casts_test.TYPES[names[0]]) for data in (before, after))
        nan = [np.isnan(values.astype(np.float32)) for values in (one, other)]
        item = np.dtype(f"u{one.itemsize}")
        return (
            one.shape == other.shape
            and np.array_equal(*nan)
            and np.array_equal(one.view(item)[~nan[0]], other.view(item)[~nan[0]])
        )

    @staticmethod
    def shaped(where: str, entries: dict, found: dict) -> None:
        for entry, (dtype, array) in entries.items():
            if entry not in found:
                raise Wrong(f"{where}: no entry '{entry}', found {sorted(found)}")
            if found[entry][:2] != (dtype, list(array.shape)):
                raise Wrong(f"{where}: '{entry}' is {found[entry][:2]}, expected {(dtype, array.shape)}")

    @staticmethod
    def same(where: str, placed: reference.LocalParam, entries: dict, found: dict) -> None:
        for entry, (dtype, array) in entries.items():
            if reference.differs(dtype, found[entry][2], array):
                have, want = np.frombuffer(found[entry][2], array.dtype), array.ravel()
                at = np.nonzero(have != want)[0]
                first = tuple(map(int, np.unravel_index(at[0], array.shape)))
                raise Wrong(
                    f"{where}: '{entry}' of '{placed.name}' {list(placed.held.labels.shape)} from "
                    f"{placed.held.dtype}, {placed.quantize}: "
                    f"{len(at)} of {array.size} {dtype} are wrong, the first at {first} of {list(array.shape)}: "
                    f"{have[at[0]]}, expected {want[at[0]]}"
                )

    def passed(
        self, placed: reference.LocalParam, anew: dict, found: dict, source: reference.Passed, all_same: bool
    ) -> dict:
        """The entries of a target with the source's `quantize`: blocks of the source are unchanged. If a param has
        other blocks too, all its blocks may have been quantized again."""
        same = source.same_blocks(placed)
        new = reference.read_codes(
            placed, {name: (dtype, list(array.shape), array.tobytes()) for name, (dtype, array) in anew.items()}
        )
        old = source.take(placed, new, same)
        if not placed.held.labels.size and len(old.tensor_scales):  # of a matrix without elements on this rank
            old.tensor_scales[:] = reference.read_codes(placed, found).tensor_scales
        result = reference.entries(placed, old.codes, old.scales, old.tensor_scales)
        if all_same:
            self.counts[f"{placed.quantize.format} copied"] += bool(placed.held.labels.size)
            return result
        have = reference.read_codes(placed, found)
        tensor = (
            new.tensor_scales
            if reference.differs("fp32", have.tensor_scales.tobytes(), old.tensor_scales)
            else old.tensor_scales
        )
        number, _ = source.grid(placed)
        blocks = have.scales.size
        unlike = (
            np.bincount(number.ravel(), weights=(have.codes != old.codes).ravel(), minlength=blocks)
            + (have.scales != old.scales).ravel()
        )
        keep = same & (unlike == 0)
        mixed = source.take(placed, new, keep)
        return reference.entries(placed, mixed.codes, mixed.scales, tensor)

    # ---------------------------------------------------------------------------------------------- quantized sources

    def chain(self, node: dict, quantized: Job, weights: jobs.Weights) -> None:
        """Uses the first target of a quantized job (its YAML, and the oracle's) as the source of others: to plain
        params, to the same format, and to another format."""
        first = (node["target"] if isinstance(node["target"], list) else [node["target"]])[0]
        endpoint = quantized.endpoints[1]
        mesh_ranks = reference.params_of(endpoint)
        forms = {
            placed.declared: placed.quantize
            for mesh_rank in mesh_ranks
            for placed in mesh_rank.values()
            if placed.quantize
        }
        if not forms:
            return
        values, source = Values(endpoint.model.labels), reference.Passed(endpoint.model.labels)
        folder = "quantized/target.0" if isinstance(node["target"], list) else "quantized"
        for mesh_rank, params in enumerate(mesh_ranks):
            found = safetensors_io.read(self.path(folder) / file_of(endpoint, mesh_rank)) if params else {}
            for name, placed in params.items():
                if not placed.quantize:
                    values.set(placed.held.labels, placed.held.dtype, np.frombuffer(found[name][2], np.uint8))
                    continue
                codes = reference.read_codes(placed, found)
                wide = reference.dequantized(placed, codes).astype(DTYPES[reference.WIDE[placed.held.dtype]])
                values.set(placed.held.labels, placed.held.dtype, np.frombuffer(wide.tobytes(), np.uint8))
                source.add(placed, codes)
                self.counts[f"from {placed.quantize.format}"] += 1
        after = self.second(node, first, forms, weights)
        self.narrow(after, "after", choose=False)
        self.compile_quantized("after", after)
        self.prove("after")
        self.move("after", folder, "after")
        job = self.oracle("after")
        alike = reference.params_of(job.endpoints[2])
        whole = {placed.declared for mesh_rank in alike for placed in mesh_rank.values() if placed.quantize}
        matrices = {
            matrix
            for mesh_rank in mesh_ranks
            for placed in mesh_rank.values()
            if placed.quantize
            for matrix in reference.matrices_of(placed)
        }
        for mesh_rank in alike:
            for placed in mesh_rank.values():
                # Codes are copied if they form whole blocks of one tensor; for nvfp4, if the whole matrix does; for
                # blocks of several rows, if they are on the tensor's grid; not from files with scales that are not
                # plain, and not with a row for each block.
                other = (
                    placed.quantize
                    and placed.quantize.format == "nvfp4"
                    and not reference.matrices_of(placed) <= matrices
                )
                files = "storage" in first and placed.quantize and placed.quantize.layout != "plain"
                rows = placed.quantize and forms[placed.declared].blocks
                if placed.quantize and (
                    other
                    or files
                    or rows
                    or not reference.plain(placed)
                    or placed.quantize.layout != forms[placed.declared].layout
                    or not reference.on_grid(placed, job.model.tensors.values())
                    or not source.same_blocks(placed).all()
                ):
                    whole.discard(placed.declared)
        before = self.counts.copy()
        self.compare("after", job, values, passed=(1, source, whole))
        for mesh_rank in reference.params_of(job.endpoints[3]):
            for placed in mesh_rank.values():
                if placed.quantize and placed.held.labels.size:
                    self.counts[f"{next(iter(forms.values())).format} to {placed.quantize.format}"] += 1
        self.counts["jobs from quantized sources"] += self.counts != before

    def second(self, node: dict, first: dict, forms: dict, weights: jobs.Weights) -> dict:
        """The job that starts from that target."""
        rng = self.rng
        layout_node = node["model"]["layouts"][first["layout"]]
        meshes = [jobs.mesh(rng, 6) for _ in range(3)]
        alike = copy.deepcopy(layout_node)
        for name, param in alike["params"].items():
            for d, rule in param.get("shard", {}).items():
                rule = rule if isinstance(rule, dict) else {"axis": rule}
                param["shard"][d] = rule if "cyclic" in rule or "scheme" in rule else rule | {"scheme": "balanced"}
            param["quantize"] = "none"
            if name in forms:
                form = forms[name]
                layout = (
                    form.layout if rng.random() < 0.8 else rng.choice(["plain", jobs.LAYOUTS[form.format] or "plain"])
                )
                param["quantize"] = {"format": form.format, "scale_layout": layout} | (
                    {"by": form.by} if form.by else {}
                )
        others = [one for one in jobs.FORMATS if one != next(iter(forms.values())).format]
        other = others[
            self.seed // len(jobs.VARIANTS) % len(others)
        ]  # the first format follows from the seed: each pair occurs
        plain, quantized = (
            weights.layout(rng, meshes[0].get("tp", 1), True, False),
            weights.layout(rng, meshes[2].get("tp", 1), False, True),
        )
        layouts = {"held": layout_node, "plain": plain, "alike": alike, "other": quantized}
        targets = []
        for layout, axes in zip(("plain", "alike", "other"), meshes):
            start = rng.randrange(4)
            targets.append({"layout": layout, "mesh": axes, "ranks": list(range(start, start + jobs.size(axes)))})
        targets[2]["quantize"] = jobs.quantize_node(rng, (other, rng.choice(["", "sender"]), ""))
        after = job_of(
            node["model"] | {"layouts": layouts},
            first | {"layout": "held"},
            targets,
            options=rng.choice([{}, {"staging": 32768}]),
        )
        # The endpoint's `ignore` does not apply to a param with its own `quantize`: params that do not match the format
        # become plain.
        self.path("after.yaml").write_text(json.dumps(after))
        for mesh_rank in reference.params_of(self.oracle("after").endpoints[2]):
            for placed in mesh_rank.values():
                if not placed.fits:
                    alike["params"][placed.declared]["quantize"] = "none"
        return after

# SPDX-License-Identifier: Apache-2.0
"""Random jobs, end to end through the commands, against the oracle: run.py --bin DIR [--jobs N] [--seed S].

For each job, the test writes source files of random bytes and runs reshard-compile and reshard-exec. Half of the jobs
fold copies, some use Megatron-Core's algorithm; two thirds are compiled with --verify-each, which needs all ranks at
once, and --no-verify; the others are proven.
Each target file must exist and be equal, byte for byte, to that of the oracle. Prints the table of cells and `N jobs,
M mismatches`. With --state=FILE the counts are in that file after each batch, and the same command continues from
there: `--jobs 1000000 --state build/property.json` can be interrupted at any time."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import generate
import safetensors_io
from oracle import ITEM, Endpoint, Held, Job
from schemes import Refused


def elements(held: Held, values: np.ndarray, padding: int) -> bytes:
    """The bytes of a param. `values` has 8 random bytes for each label."""
    item = ITEM[held.dtype]
    table = values[:, :item]
    if held.dtype == "bool":
        table = table & 1
    rows = table[held.labels.reshape(-1)]
    rows[held.labels.reshape(-1) == 0] = padding
    return rows.tobytes()


def folder_of(endpoint: Endpoint, params: list[dict[str, Held]], values: np.ndarray, padding: int) -> dict[str, dict]:
    """The contents of the files of an endpoint, by file name. Mesh ranks without authority hold other bytes, so that
    reading them is an error."""
    files = {}
    right = values
    for mesh_rank, held in enumerate(params):
        values = right if endpoint.admits(endpoint.node.get("authority", {}), mesh_rank) else right ^ 0xFF
        tensors = {name: (h.dtype, list(h.labels.shape), elements(h, values, padding)) for name, h in held.items()}
        if tensors:
            files[
                "model.safetensors" if endpoint.checkpoint else f"rank-{endpoint.ranks[mesh_rank]:05d}.safetensors"
            ] = tensors
    return files


def try_job(seed: int, cell: tuple, work: Path) -> tuple[Job, list, set, set, bool] | None:
    """A valid job, written to work/job.yaml: the job, its params, its cells, its features, and whether bytes must
    move between ranks. None if the random job is invalid."""
    rng = random.Random(seed)
    node, cells, features = generate.generate(rng, cell)
    (work / "job.yaml").write_text(json.dumps(node, indent=1))
    try:
        job = Job(str(work / "job.yaml"))
        held = job.check()
    except Refused:
        return None
    if not any(h.labels.size for endpoint in held[1:] for params in endpoint for h in params.values()):
        return None
    if cells and cell not in cells:
        return None
    remote = False
    source = job.endpoints[0]
    if not source.storage:
        own = dict(zip(source.ranks, held[0]))
        for endpoint, mesh_ranks in zip(job.endpoints[1:], held[1:]):
            for rank, params in zip(endpoint.ranks, mesh_ranks):
                have = {label for h in own.get(rank, {}).values() for label in h.labels.reshape(-1).tolist()}
                remote = remote or (
                    not endpoint.storage
                    and any(set(h.labels.reshape(-1).tolist()) - have - {0} for h in params.values())
                )
    return job, held, cells, features, remote


def run_job(
    job: Job, held: list, work: Path, binaries: Path, seed: int, compiler: Path, algorithm: Sequence[str] = ()
) -> str:
    """Runs the commands and compares the target files with the oracle. Returns an error text, empty on success."""
    values = np.random.default_rng(seed).integers(0, 256, (job.model.labels, 8), dtype=np.uint8)
    source, target, plan = work / "source", work / "target", work / "plan.rplan"
    source.mkdir()
    for name, tensors in folder_of(job.endpoints[0], held[0], values, 0xAB).items():
        safetensors_io.write(source / name, tensors)
    proof = ("--verify-each", "--no-verify") if seed % 3 else ()
    fold = f"--fold-copies={'always' if seed % 2 else 'never'}"
    for command in (
        [compiler / "reshard-compile", work / "job.yaml", "-o", plan, *proof, "--jobs=1", fold, *algorithm],
        [binaries / "reshard-exec", plan, f"--source={source}", f"--target={target}", "--threads=1"],
    ) + (
        (
            [binaries / "reshard-exec", plan, "--synthesize", "--check", "--threads=1"],
            [binaries / "reshard-inspect", plan, "--verify"],
        )
        if seed % 5 == 0
        else ()
    ):
        result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        if result.returncode != 0:
            return (
                f"{Path(command[0]).name} exit {result.returncode}: {result.stderr.strip()} "
                f"{result.stdout.strip()[-300:]}"
            )
    for number, endpoint in enumerate(job.endpoints[1:], 1):
        folder = target / endpoint.role if len(job.endpoints) > 2 else target
        expected = folder_of(endpoint, held[number], values, 0)
        found = {path.name for path in folder.iterdir() if path.suffix == ".safetensors"}
        if found != set(expected):
            return f"{endpoint.role}: files {sorted(found)}, expected {sorted(expected)}"
        for file, tensors in expected.items():
            have = safetensors_io.read(folder / file)
            if set(have) != set(tensors):
                return f"{endpoint.role} {file}: params {sorted(have)}, expected {sorted(tensors)}"
            for name, (dtype, shape, data) in tensors.items():
                if have[name][:2] != (dtype, shape):
                    return f"{endpoint.role} {file} {name}: {have[name][:2]}, expected {(dtype, shape)}"
                if have[name][2] != data:
                    at = next(i for i, (a, b) in enumerate(zip(have[name][2], data)) if a != b) // ITEM[dtype]
                    return f"{endpoint.role} {file} {name} {shape}: element {at} differs from the oracle"
    return ""


def run_in_chunks(
    job: Job, held: list, work: Path, binaries: Path, seed: int, compiler: Path, algorithm: Sequence[str] = ()
) -> str:
    """The same job with checkpoints of torch.distributed.checkpoint as targets, in small chunks. Returns an error
    text, empty on success."""
    node = json.loads((work / "job.yaml").read_text())
    for target in node["target"] if isinstance(node["target"], list) else [node["target"]]:
        if "storage" in target and not target.get("mesh"):
            target["storage"] = {"folder": "checkpoint", "format": "dcp", "chunk": (1, 8, 30, 100)[seed % 4]}
    (work / "chunks.yaml").write_text(json.dumps(node))
    plan, target = work / "chunks.rplan", work / "chunks"
    for command in (
        [compiler / "reshard-compile", work / "chunks.yaml", "-o", plan, "--verify-each", "--jobs=1", *algorithm],
        [binaries / "reshard-inspect", plan, "--verify"],
        [binaries / "reshard-exec", plan, f"--source={work / 'source'}", f"--target={target}", "--threads=1"],
    ):
        result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        if result.returncode != 0:
            return (
                f"in chunks: {Path(command[0]).name} exit {result.returncode}: {result.stderr.strip()} "
                f"{result.stdout.strip()[-300:]}"
            )
    values = np.random.default_rng(seed).integers(0, 256, (job.model.labels, 8), dtype=np.uint8)
    for number, endpoint in enumerate(job.endpoints[1:], 1):
        for tensors in folder_of(endpoint, held[number], values, 0).values() if endpoint.checkpoint else ():
            folder = target / endpoint.role if len(job.endpoints) > 2 else target
            listing = subprocess.run(
                [binaries / "reshard-inspect", folder, "--format=json"], capture_output=True, text=True, check=True
            )
            found = json.loads(listing.stdout)["tensors"]
            files = {chunk["file"] for tensor in found.values() for chunk in tensor["chunks"]}
            stored = {file: (folder / file).read_bytes() for file in files}
            if set(found) != set(tensors):
                return f"{endpoint.role} in chunks: tensors {sorted(found)}, expected {sorted(tensors)}"
            for name, (dtype, shape, data) in tensors.items():
                have = np.zeros((*shape, ITEM[dtype]), np.uint8)
                for chunk in found[name]["chunks"]:
                    box = tuple(slice(at, at + length) for at, length in zip(chunk["offsets"], chunk["lengths"]))
                    content = stored[chunk["file"]][chunk["begin"] : chunk["begin"] + chunk["bytes"]]
                    have[box] = np.frombuffer(content, np.uint8).reshape(*chunk["lengths"], ITEM[dtype])
                if (found[name]["dtype"], found[name]["shape"], have.tobytes()) != (dtype, shape, data):
                    return f"{endpoint.role} in chunks: tensor {name} {shape} differs from the oracle"
    return ""


def worker(task: tuple) -> tuple:
    seed, cell, binaries, compiler, keep = task
    for attempt in range(400):
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
            work = Path(folder)
            made = try_job(seed * 1000 + attempt, cell, work)
            if made is None:
                continue
            job, held, cells, features, remote = made
            algorithm = ["--algorithm=megatron"] if "algorithm megatron" in features else []
            error = run_job(job, held, work, Path(binaries), seed, Path(compiler), algorithm)
            if not error and any(endpoint.checkpoint for endpoint in job.endpoints[1:]):
                features.add("target in chunks")
                error = run_in_chunks(job, held, work, Path(binaries), seed, Path(compiler), algorithm)
            if error and keep:
                shutil.copytree(work, Path(keep) / f"job-{seed}", dirs_exist_ok=True)
            return seed, cells, features, remote, error, (work / "job.yaml").read_text() if error else ""
    return seed, set(), set(), False, "", ""


class Counts:
    """What has been run. Each batch follows from the counts and the seed, so that a run that continues from its state
    tests the jobs of an uninterrupted one."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.path = Path(options.state) if options.state else None
        self.first = self.seed = options.seed * 1_000_000
        self.done = self.mismatches = self.remote = self.nested = 0
        self.filled: Counter = Counter(dict.fromkeys(generate.CELLS, 0))
        self.features: Counter = Counter()
        if self.path and self.path.exists():
            kept = json.loads(self.path.read_text())
            if kept["first"] != self.first:
                raise SystemExit(
                    f"{self.path}: its run began with seed {kept['first'] // 1_000_000}, expected {options.seed}"
                )
            self.seed, self.done, self.mismatches, self.remote, self.nested = (
                kept[key] for key in ("seed", "done", "mismatches", "remote", "nested")
            )
            self.filled.update({tuple(cell): count for cell, count in kept["filled"]})
            self.features.update(kept["features"])

    def batch(self, count: int) -> list[tuple]:
        """The next jobs, for the cells that have the fewest: (seed, cell)."""
        order = random.Random(self.seed)
        least = sorted(generate.CELLS, key=lambda cell: (self.filled[cell], order.random()))[:count]
        self.seed += len(least)
        return [(self.seed - len(least) + i, cell) for i, cell in enumerate(least)]

    def add(self, cells: set, found: set, moved: bool, failed: bool) -> None:
        self.done += 1
        self.remote += moved
        self.nested += len(found) + (1 if any(c[1] in ("nested", "stack", "interleave") for c in cells) else 0) >= 2
        self.filled.update(cells)
        self.features.update(found)
        self.mismatches += failed

    def keep(self) -> None:
        if self.path:
            state = {
                "first": self.first,
                "seed": self.seed,
                "done": self.done,
                "mismatches": self.mismatches,
                "remote": self.remote,
                "nested": self.nested,
                "filled": list(self.filled.items()),
                "features": self.features,
            }
            beside = self.path.with_suffix(".new")
            beside.write_text(json.dumps(state))
            beside.replace(self.path)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", required=True)
    parser.add_argument("--compiler", help="folder of reshard-compile, if it differs from --bin")
    parser.add_argument("--jobs", type=int, default=5000 if "RESHARD_FULL" in os.environ else 300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep-failing", default="")
    parser.add_argument("--until-failure", action="store_true")
    parser.add_argument("--state", help="a file for the counts of a run that may be interrupted")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    counts = Counts(options)
    filled = counts.filled
    with multiprocessing.Pool(options.processes) as pool:
        full = options.jobs >= 5000 and not options.until_failure  # then each cell needs 20 jobs
        while (
            counts.done < options.jobs or (full and min(filled[cell] for cell in generate.CELLS) < 20)
        ) and counts.seed < counts.first + 20 * options.jobs:
            tasks = [
                (seed, cell, options.bin, options.compiler or options.bin, options.keep_failing)
                for seed, cell in counts.batch(40)
            ]
            for number, cells, found, moved, error, text in pool.imap_unordered(worker, tasks):
                if not cells and not found and not error:
                    continue
                counts.add(cells, found, moved, bool(error))
                if error and counts.mismatches <= 3:
                    print(f"seed {number}: {error}\n{text}\n", flush=True)
            counts.keep()
            if counts.mismatches and options.until_failure:
                break
    done, mismatches = counts.done, counts.mismatches
    print(
        f"{'scheme':<12}{'pack':<12}"
        + "".join(f"{r[:6]}.{s[:3]:<5}" for r in generate.RELATIONS for s in generate.SIDES)
    )
    for scheme in generate.SCHEMES:
        for pack in generate.PACKS:
            if (scheme, pack) not in generate.IMPOSSIBLE:
                print(
                    f"{scheme:<12}{pack:<12}"
                    + "".join(f"{filled[scheme, pack, r, s]:<11}" for r in generate.RELATIONS for s in generate.SIDES)
                )
    print("features: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.features.items())))
    poorest = min(filled[cell] for cell in generate.CELLS)
    print(
        f"least covered cell: {poorest} jobs; jobs with remote bytes: {100 * counts.remote // max(1, done)} %; "
        f"with two features nested: {100 * counts.nested // max(1, done)} %"
    )
    print(f"{done} jobs, {mismatches} mismatches")
    missing = []
    if options.jobs >= 300:
        missing = [feature for feature in generate.TARGET_FEATURES if not counts.features[feature]]
    if missing:
        print(f"no job with: {', '.join(missing)}")
    rare = 100 * counts.remote < 30 * done or 100 * counts.nested < 30 * done
    if done < options.jobs or mismatches or missing or rare:
        return 1
    return 0 if options.jobs < 5000 or poorest >= 20 else 1


if __name__ == "__main__":
    sys.exit(main())

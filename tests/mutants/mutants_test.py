# SPDX-License-Identifier: Apache-2.0
"""Altered plans: loader, proof and check agree, nothing crashes, nothing hangs (mutants.cpp).

The plans come from random jobs of the property test, the same with quantized targets, jobs with relays, and the rows
and random jobs of the conformance suite. RESHARD_BIN: the folder of the commands. Arguments: COUNT SEED of the
mutants."""

import json
import os
import random
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import generate
import quantize_jobs
from commands import BIN, run

FULL, SMALL = "RESHARD_FULL" in os.environ, "RESHARD_SMALL" in os.environ
JOBS = 240 if FULL else 20 if SMALL else 40  # a random job may be invalid, and then has no plan
MUTANTS = 100_000 if FULL else 200 if SMALL else 1000


def property_job(seed):
    node, _, _ = generate.generate(random.Random(seed), generate.CELLS[seed * 37 % len(generate.CELLS)])
    return node | {
        "options": node.get("options", {}) | ({}, {"topology": {"ranks_per_node": 2}}, {"staging": 4096})[seed % 3]
    }


def quantized_job(seed):
    rng = random.Random(seed)
    node = quantize_jobs.generated(rng, seed)
    variant = quantize_jobs.VARIANTS[seed % len(quantize_jobs.VARIANTS)]
    for target in node["target"] if isinstance(node["target"], list) else [node["target"]]:
        target["quantize"] = quantize_jobs.quantize_node(rng, variant)
    if seed % 4 == 0 and "storage" not in node["source"]:
        node["source"]["quantize"] = quantize_jobs.FORMATS[seed // 4 % 3]
    return node


def matrix_job(seed):
    """One or two small matrices, sharded and quantized. The job is always valid."""
    rng = random.Random(seed)
    variant = quantize_jobs.VARIANTS[seed % len(quantize_jobs.VARIANTS)]
    rows, columns, tp = rng.choice([16, 48, 128]), rng.choice([64, 128]), rng.choice([1, 2])
    source = {"mesh": {"sp": rng.choice([1, 2])}, "layout": "a"}
    if rng.random() < 0.3:
        source["quantize"] = rng.choice(quantize_jobs.FORMATS)
    last = source["mesh"]["sp"]
    return {
        "version": 1,
        "model": {
            "dtype": rng.choice(quantize_jobs.FLOATS),
            "index": {"layer": rng.choice([1, 2])},
            "tensors": {"l.{layer}.w": {"shape": [rows, columns]}, "n": {"shape": [columns]}},
            "layouts": {
                "a": {"params": {"h.{layer}.w": {"holds": "l.{layer}.w", "shard": {"0": "sp"}}, "n": {"holds": "n"}}},
                "b": {"params": {"w{layer}": {"holds": "l.{layer}.w", "shard": {"0": "tp"}}, "n": {"holds": "n"}}},
            },
        },
        "source": source,
        "target": {
            "mesh": {"tp": tp},
            "layout": "b",
            "ranks": list(range(last, last + tp)),
            "quantize": quantize_jobs.quantize_node(rng, variant),
        },
        "options": rng.choice([{}, {"staging": 4096}]),
    }


def relayed_job(seed):
    """One or two ranks of a node of four send to another node, and the idle ones relay, in one phase or in several."""
    rng = random.Random(seed)
    return {
        "version": 1,
        "model": {
            "dtype": "bf16",
            "tensors": {
                "a": {"shape": [rng.choice([48, 96]), 64], "shard": {"1": "tp"}},
                "b": {"shape": [4, 50], "shard": {"0": "tp"}},
            },
        },
        "source": {"mesh": {"tp": rng.choice([1, 2])}},
        "target": {"mesh": {"tp": 4}, "ranks": "4..7"},
        "options": rng.choice([{}, {"staging": 4096}])
        | {"topology": {"ranks_per_node": 4, "nics": {"per_node": 4, "rate": "1MB/s", "latency": "1ns"}}},
    }


def jobs():
    for seed in range(JOBS):
        yield f"{seed:03}", (property_job, quantized_job, matrix_job, relayed_job)[seed % 4](seed)
    if FULL:
        import conformance_test

        for name, job in conformance_test.rows():
            yield f"row-{name}", job
        for seed in range(100):
            yield conformance_test.random_job(seed)


def compile_job(folder, name, job):
    (folder / f"{name}.yaml").write_text(json.dumps(job))
    run("reshard-compile", f"{name}.yaml", "-o", f"{name}.rplan", "--jobs=1", code=None, cwd=folder)


def main():
    count, seed = sys.argv[1:] if len(sys.argv) == 3 else (str(MUTANTS), "1")
    folder = Path(tempfile.mkdtemp(prefix="reshard-mutants-"))  # kept after an error
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(compile_job, folder, name, job) for name, job in jobs()]:
            done.result()
    found = run(BIN / "mutants", folder, count, seed, code=None, timeout=None, capture_output=False).returncode
    if found == 0:
        shutil.rmtree(folder)
    return found


if __name__ == "__main__":
    sys.exit(main())

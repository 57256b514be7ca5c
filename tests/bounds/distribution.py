# SPDX-License-Identifier: Apache-2.0
"""The distribution of simulated time / lower bound over random jobs (jobs.py), and of the bound and the simulated time
over the optimum of small ones (optimum.py), as the tables of docs/performance.md. distribution.py [--jobs N]
[--small N] [--first SEED] [--print]; RESHARD_BIN: the folder of the commands. Every plan is proven."""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
from pathlib import Path

import jobs
import lower_bounds
import optimum
from commands import run


class Measured:
    """The plan of a job: `ratio` of the simulated time to the bound, both in seconds, the compiler's CPU seconds, the
    transfers, messages and cuts."""

    def __init__(self, node: dict, folder: Path) -> None:
        job, plan, report, network = (folder / name for name in ("job.yaml", "plan", "report.json", "network.yaml"))
        job.write_text(json.dumps(node))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run("reshard-compile", job, "-o", plan, f"--report={report}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        topology = node["options"]["topology"]
        if not isinstance(topology, str):
            network.write_text(json.dumps(topology))
            topology = network
        found = json.loads(run("reshard-inspect", plan, f"--simulate={topology}", "--format=json").stdout)
        self.seconds, self.bound = found["seconds"], found["lower_bound"]
        self.ratio = self.seconds / self.bound if self.bound else 1.0
        counts = json.loads(report.read_text())
        assert counts["proven"], node
        self.transfers, self.messages, self.cuts = counts["transfers"], counts["messages"], counts["lower_bounds"]
        self.layout = lambda: run("reshard-compile", job, "--emit=layout").stdout


def bound_without_latencies(found: Measured) -> float:
    """Seconds, as in the optimum of a small job."""
    network = lower_bounds.Network(found.layout())
    return max((lower_bounds.seconds(cut, network) for cut in found.cuts.values()), default=0.0)


def quantiles(values: list[float]) -> str:
    """Median, p90, p99, max, as cells of a table."""
    values = sorted(values)
    return " | ".join(f"{values[min(len(values) - 1, int(len(values) * part))]:.3f}" for part in (0.5, 0.9, 0.99, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--small", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--print", action="store_true", help="a line for each job")
    options = parser.parse_args()
    ratios: dict[str, list[float]] = {kind: [] for kind in jobs.KINDS}
    planning = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.first, options.first + options.jobs):
            node, kind = jobs.job(seed)
            found = Measured(node, Path(folder))
            if found.bound >= 1e-3 or kind != jobs.KINDS[0]:
                ratios[kind].append(found.ratio)
            if found.transfers >= 10_000:
                planning.append(1e6 * found.cpu / found.transfers)
            if options.print:
                print(f"{seed} {kind}: {found.ratio:.3f} x of {1e3 * found.bound:.3f} ms, {found.messages} messages")
        small = []
        for seed in range(options.first, options.first + options.small):
            found = Measured(jobs.small_job(seed), Path(folder))
            least = optimum.optimum(found.layout())
            if least:
                small.append((bound_without_latencies(found) / least, found.seconds / least))
            if options.print and least:
                print(f"small {seed}: bound {small[-1][0]:.3f}, plan {small[-1][1]:.3f} x the optimum")
    print("| simulated / bound | jobs | median | p90 | p99 | max |\n|---|---:|---:|---:|---:|---:|")
    for kind, values in ratios.items():
        if values:
            print(f"| {kind} | {len(values)} | {quantiles(values)} |")
    if small:
        print(f"| small jobs, simulated / optimum | {len(small)} | {quantiles([plan for _, plan in small])} |")
        print(f"| small jobs, optimum / bound | {len(small)} | {quantiles([1 / bound for bound, _ in small])} |")
        print(f"largest bound of a small job: {max(bound for bound, _ in small):.9f} x the optimum")
    if planning:
        print(f"| CPU seconds for a million transfers | {len(planning)} | {quantiles(planning)} |")


if __name__ == "__main__":
    main()

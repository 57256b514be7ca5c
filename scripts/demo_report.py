# SPDX-License-Identifier: Apache-2.0
"""Prints the demo's report: bytes moved, lower bounds, speed, and whether all bytes are right. demo_report.py FOLDER:
the folder with compile.json, exec.json and files.json."""

import json
import sys
from pathlib import Path


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.1f} {unit}" if unit != "B" else f"{count} B"
        count /= 1024
    return ""


def main() -> int:
    work = Path(sys.argv[1])
    compiled, memory, files = (json.loads((work / f"{name}.json").read_text()) for name in ("compile", "exec", "files"))
    moved, balance, passes = compiled["bytes"], compiled["balance"], compiled["time_ms"]
    in_memory, from_files = (min(report["runs"], key=lambda run: run["seconds"]) for report in (memory, files))
    print("== report: Qwen3-0.6B, Megatron TP2·PP2·DP2 on ranks 0-7 -> vLLM TP4 on ranks 8-11\n")
    for name, value, meaning in (
        ("target bytes", size(moved["target"]), "held by the engine's 4 ranks"),
        ("copied locally", size(moved["local"]), "the trainer and the engine have no rank in common"),
        ("sent", size(moved["remote"]), f"in {compiled['messages']} messages, {compiled['rounds']} rounds"),
        ("busiest sender", size(balance["egress_max"]), f"lower bound {size(balance['egress_bound'])}"),
        ("busiest receiver", size(balance["ingress_max"]), f"lower bound {size(balance['ingress_bound'])}"),
        (
            "compile",
            f"{passes['total']:.1f} ms",
            f"plan of {size(compiled['plan_bytes'])} for 12 ranks; {passes['passes']['verify']:.1f} ms of it are the "
            "proof",
        ),
        (
            "run in memory",
            f"{in_memory['seconds']:.3f} s",
            f"{in_memory['gb_per_s']:.1f} GB/s, fastest of {len(memory['runs'])} runs",
        ),
        ("run from files", f"{from_files['seconds']:.3f} s", f"{from_files['gb_per_s']:.1f} GB/s"),
    ):
        print(f"  {name:<17} {value:>10}   {meaning}")
    mismatches = memory["mismatches"] + files["mismatches"]
    checked = memory["checked_bytes"] + files["checked_bytes"]
    right = mismatches == 0 and checked > 0
    print(f"\n  {'RIGHT' if right else 'WRONG'}: {checked} bytes checked, {mismatches} elements wrong")
    print(f"  plan: {work / 'refit.rplan'}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

"""Prints the demo's result: bytes moved, the lower bound, the speed, and whether all bytes are right."""

import json
import sys
from pathlib import Path

work = Path(sys.argv[1])
compiled = json.loads((work / "compile.json").read_text())
memory = json.loads((work / "exec.json").read_text())
files = json.loads((work / "files.json").read_text())


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.1f} {unit}" if unit != "B" else f"{count} B"
        count /= 1024
    return ""


bytes_ = compiled["bytes"]
balance = compiled["balance"]
fastest = min(memory["runs"], key=lambda run: run["seconds"])
rows = [
    ("target bytes", size(bytes_["target"]), "held by the engine's 4 ranks"),
    ("local", size(bytes_["local"]), "already on the same rank"),
    ("remote", size(bytes_["remote"]), f"in {compiled['messages']} messages, {compiled['rounds']} round(s)"),
    ("busiest sender", size(balance["egress_max"]), f"lower bound {size(balance['egress_bound'])}"),
    ("busiest receiver", size(balance["ingress_max"]), f"lower bound {size(balance['ingress_bound'])}"),
    ("compile", f"{compiled['time_ms']['total']:.1f} ms", f"plan of {size(compiled['plan_bytes'])}"),
    ("move, in memory", f"{fastest['seconds']:.3f} s", f"{fastest['gb_per_s']:.1f} GB/s, fastest of {len(memory['runs'])}"),
    ("move, from files", f"{files['runs'][0]['seconds']:.3f} s", f"{files['runs'][0]['gb_per_s']:.1f} GB/s"),
]
for name, value, meaning in rows:
    print(f"  {name:<18} {value:>12}   {meaning}")
mismatches = memory["mismatches"] + files["mismatches"]
checked = memory["checked_bytes"] + files["checked_bytes"]
print(f"  all {checked} checked bytes right" if mismatches == 0 else f"  {mismatches} elements WRONG")
sys.exit(0 if mismatches == 0 and checked > 0 else 1)

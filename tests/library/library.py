# SPDX-License-Identifier: Apache-2.0
"""The library under examples/models for tests: models, layouts, a mesh for each layout, and the params of a layout on
one rank, parsed from the layout IR."""

import json
import re
import subprocess
from pathlib import Path

from layout_text import endpoints

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "examples" / "models"
LISTINGS = Path(__file__).resolve().parent / "listings"

# Models that others only extend have no config.json.
NAMES = sorted(path.name[: -len(".config.json")] for path in MODELS.glob("*.config.json"))
FURTHER_LAYOUTS = [
    "megatron-checkpoint",
    "megatron-checkpoint-layers",
    "megatron-checkpoint-singleton",
    "fsdp2-checkpoint",
    "hf-multimodal",
    "vllm-multimodal",
    "sglang-multimodal",
    "vllm-bf16-gate",
    "hf-mxfp4",
]
LAYOUTS = ["hf", "megatron", "megatron-local", "vllm", "sglang", "fsdp2", "fsdp1"]


def mesh(layout):
    """A mesh of 8 ranks (a checkpoint: of one file) that fits the layout of every model."""
    if layout == "hf":
        return "{}"
    if layout.startswith("fsdp"):
        return "{fsdp: 8}"
    if layout.startswith("megatron"):
        return "{megatron: {tp: 2, pp: 2, dp: 2, ep: 2}}"
    return "{tp: 4, dp: 2, views: [{ep: 8}]}"


def endpoint(model, layout):
    placement = ""
    if layout.startswith("megatron") and model in ("deepseek-v3", "kimi-k2"):  # 61 layers
        placement = ", place: {layer: {axis: pp, sizes: [31, 30]}, expert: ep}"
    # Engines hold some weights in fp32 that other layouts hold in bf16: they are rounded.
    return "{layout: %s, mesh: %s%s, convert: rne}" % (layout, mesh(layout), placement)


def job(model, source, target):
    return f"version: 1\nmodel: {MODELS / (model + '.yaml')}\nsource: {source}\ntarget: {target}\n"


def layouts(binaries, model, folder):
    """The layouts of a model: those that the compiler accepts."""
    path = Path(folder) / "layouts.yaml"
    path.write_text(job(model, "{layout: none, mesh: {}}", "{layout: hf, mesh: {}}"))
    done = subprocess.run([binaries / "reshard-compile", path, "--emit=layout"], capture_output=True, text=True)
    known = []
    for layout in LAYOUTS:
        path.write_text(job(model, "{layout: hf, mesh: {}}", "{layout: %s, mesh: {}}" % layout))
        done = subprocess.run([binaries / "reshard-compile", path, "--emit=layout"], capture_output=True, text=True)
        if "unknown layout" not in done.stderr:
            known.append(layout)
    return known


def params(binaries, model, layout, folder, sets=(), more=""):
    """{name: (shape, dtype)} of all params of a layout on one rank, from the layout IR. `sets`: other `let` values;
    `more`: keys of the endpoint."""
    text = job(model, "{layout: hf, mesh: {}}", "{layout: %s, mesh: {}%s}" % (layout, more))
    return endpoints(binaries, text, folder, [f"model.let.{each}" for each in sets])["target"].params(0)


def chunked_endpoint(layout, mesh, placement):
    """An endpoint of a Megatron layout with two chunks on each rank; `placement`: the rule for layers."""
    axes = ", ".join(f"{axis}: {size}" for axis, size in mesh.items())
    return f"{{layout: {layout}, mesh: {{megatron: {{{axes}}}}}, switches: {{vpp: 2}}, place: {{layer: {placement}}}}}"


def chunked(binaries, model, layout, mesh, placement, sets, folder):
    """The same, parsed from the layout IR; `sets`: other `let` values."""
    source = chunked_endpoint(layout, mesh, placement)
    return endpoints(
        binaries, job(model, source, "{layout: hf, mesh: {}}"), folder, [f"model.let.{each}" for each in sets]
    )["source"]


def listing(path):
    """{name: (shape, dtype)} of a listing: lines `name.{0..3,5}.weight  [2, 4]`, with a dtype if it is not bf16."""
    return listed(path.read_text(), path.name)


def listed(text, title):
    result = {}
    for line in text.splitlines():
        line = line.split("#")[0].strip()
        if not line:
            continue
        name, shape, dtype = re.fullmatch(r"(\S+)\s+\[([\d, ]*)\]\s*(\w*)", line).groups()
        names = [""]
        for text, ranges in re.findall(r"([^{]*)(?:\{([\d.,]+)\})?", name):
            values = [""]
            if ranges:
                values = []
                for item in ranges.split(","):
                    first, _, last = item.partition("..")
                    values += [str(i) for i in range(int(first), int(last or first) + 1)]
            names = [head + text + value for head in names for value in values]
        for each in names:
            assert each not in result, f"{title}: {each} twice"
            result[each] = ([int(n) for n in shape.split(",") if n.strip()], dtype or "bf16")
    return result


def numbers(path):
    """The `let` values of a listing: `# set: layers=2 hidden=32`."""
    found = re.search(r"^# set: (.*)$", path.read_text(), re.MULTILINE)
    return found[1].split() if found else []


def compile_pair(binaries, model, source, target, folder):
    """Compiles a pair of layouts and returns the report. Target params that the source lacks are omitted."""
    path = Path(folder) / "pair.yaml"
    path.write_text(job(model, endpoint(model, source), endpoint(model, target)))
    report = Path(folder) / "report.json"
    done = subprocess.run(
        [
            binaries / "reshard-compile",
            path,
            "-o",
            Path(folder) / "pair.rplan",
            "--allow=missing",
            f"--report={report}",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{model} {source} -> {target}: {done.stderr}"
    return json.loads(report.read_text())


def row(model, source, target, report):
    """A line of docs/library-tables.md, without the time."""
    return (
        f"| {model} | {source} | {target} | {report['bytes']['target'] / 2**30:.2f} | "
        f"{report['bytes']['remote'] / 2**30:.2f} | {report['transfers']:,} | {report['messages']} |"
    )

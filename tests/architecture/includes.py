# SPDX-License-Identifier: Apache-2.0
"""Checks which room may include which, the libraries that the executor may link, the length of files, types of one
name, which files name a format of checkpoints, and the license line of source files. The rules are data. Run as a
test: includes.py BUILD"""

import ast
import re
import subprocess
import sys
from pathlib import Path

root = Path(__file__).resolve().parents[2]
build = Path(sys.argv[1])

# Libraries whose includes are looked at, by the beginning of the include.
LIBRARIES = ("llvm/", "yaml-cpp/", "flatbuffers/", "nlohmann/", "CLI/", "xxhash.h", "mpi.h", "nccl.h", "ucp/", "cuda")
# room -> what its files may include beside its own: rooms (executor/* is executor and all rooms in it), single files,
# and libraries. A file belongs to the innermost room.
ROOMS = {
    "cmake": "",
    "base": "xxhash.h",
    "base/yaml": "base",
    "base/formats": "",
    "schema": "base base/formats flatbuffers/",
    "ir": "base/formats llvm/",
    "compiler/frontend": "compiler/pass.h base base/yaml base/formats ir llvm/",
    "compiler/resolve": "compiler/pass.h compiler/frontend base base/yaml base/formats ir llvm/",
    "compiler/transfer": "compiler/pass.h compiler/frontend compiler/resolve base base/yaml base/formats ir llvm/",
    "compiler/schedule": (
        "compiler/pass.h compiler/frontend compiler/resolve compiler/transfer base base/yaml base/formats ir llvm/"
    ),
    "compiler": "compiler/* base base/yaml base/formats ir llvm/",
    "kernels": "base/formats",
    "kernels/cpu": "kernels base/formats",
    "kernels/gpu": "kernels/cpu kernels base/formats",
    "reshard": "",  # include/reshard: the headers that are installed
    "executor/rendezvous": "base",
    "executor/load": "base base/formats schema flatbuffers/",
    "executor/interfaces": "executor/rendezvous base kernels/*",
    "executor/memory": "executor/interfaces executor/load base base/formats schema kernels/* flatbuffers/",
    "executor/transports": (
        "executor/memory executor/interfaces executor/load executor/rendezvous base schema kernels/*"
    ),
    "executor/digests": "executor/transports executor/memory executor/interfaces base schema kernels/*",
    "executor/pull": (
        "executor/digests executor/transports executor/memory executor/interfaces executor/load "
        "executor/rendezvous base schema"
    ),
    "executor/api": "executor/* reshard base schema kernels/*",
    "executor/backends": "executor/interfaces executor/rendezvous/rendezvous.h base mpi.h",
    "checkpoints": "base base/formats schema nlohmann/",
    "verify/layout": "base base/formats schema executor/memory/view_jobs.h kernels/cpu/quantized.h",
    "verify/proof": "verify/layout base schema executor/load",
    "verify/check": (
        "verify/layout base base/formats schema executor/load executor/memory/view_jobs.h kernels/cpu/convert.h"
    ),
    "command": "base",
    "report/simulate": "command verify/proof base schema executor/load executor/memory/chunks.h nlohmann/",
    "report/explain": "command report/inspect verify/* base schema",
    "report/diff": "command report/inspect base schema executor/load nlohmann/",
    "report/page": "command report/simulate verify/* base schema executor/load executor/memory/chunks.h nlohmann/",
    "report/inspect": "command report/* checkpoints verify/* base base/formats schema executor/load nlohmann/",
    "tools/run": "reshard command checkpoints verify/* base base/formats executor/* schema nlohmann/",
    "tools": "reshard command checkpoints verify/* report/* tools/run base executor/load schema nlohmann/",
    # Tests of a room use it and the rooms that make its input.
    "tests/lib": "",
    "tests/e2e": "",
    "tests/base": "tests/lib base",
    "tests/yaml": "tests/lib base base/yaml",
    "tests/ir": "ir compiler/*",
    "tests/compiler": "tests/lib compiler/* ir schema base base/yaml llvm/",
    "tests/schema": "tests/lib schema compiler/* ir executor/load/load.h flatbuffers/ llvm/ xxhash.h",
    "tests/kernels": "kernels/* cuda",
    "tests/rendezvous": "tests/lib executor/rendezvous base",
    "tests/executor": (
        "tests/lib tests/verify/support.h reshard base schema compiler/* kernels/* executor/* verify/* "
        "tools/run flatbuffers/"
    ),
    "tests/checkpoints": "tests/lib base checkpoints nlohmann/",
    "tests/verify": (
        "tests/lib tests/executor tests/schema reshard base schema compiler/* executor/* verify/* report/* "
        "tools/run flatbuffers/"
    ),
    "tests/report": "tests/lib tests/verify/support.h base schema executor/load report/* flatbuffers/ nlohmann/",
    "tests/tools": "tests/lib tests/executor tests/verify/support.h base schema executor/* command verify/* tools/run",
    "tests/conformance": "reshard command executor/* verify/check tools/run mpi.h",
    "tests/mutants": "tests/schema base schema executor/* command verify/* report/* tools/run flatbuffers/",
    "tests/fuzz": "tests/lib tests/executor tests/schema ir base/yaml compiler/* executor/* checkpoints verify/*",
    "tests/bench": (
        "tests/lib tests/verify/bound.h reshard base schema compiler/* kernels/* executor/* command verify/* report/* "
        "tools/run mpi.h"
    ),
    "tests/gpu": "tests/lib tests/kernels reshard base schema kernels/* executor/* verify/* nccl.h cuda",
    "tests/mpi": "mpi.h",
}
# single files that may include more, and those that may include less
MORE = {
    "executor/memory/view_jobs.cpp": "executor/transports/transport.h",
    "base/yaml/parse.cpp": "yaml-cpp/",
    "compiler/frontend/config.cpp": "nlohmann/",
    "compiler/frontend/config.h": "nlohmann/json_fwd.hpp",
    "compiler/emit.cpp": "schema/container.h schema/limits.h schema/manifest.h flatbuffers/",
    "compiler/inputs.cpp": "schema/limits.h schema/plan_generated.h",
    "compiler/schedule/assign_staging.cpp": "schema/step_rules.h",
    "compiler/schedule/dependency_levels.cpp": "schema/step_rules.h",
    "compiler/schedule/rank_steps.h": "schema/step_rules.h",
    "compiler/schedule/schedule.cpp": "schema/step_rules.h",
    "ir/ir.h": "base/topology.h",
    "ir/verify.cpp": "schema/step_rules.h",
    "kernels/gpu/launch.h": "cuda",
    "kernels/gpu/conversion_kernel.h": "cuda",
    "executor/backends/current_device.h": "cuda",
    "executor/backends/cuda.cpp": (
        "executor/interfaces/device.h executor/interfaces/communicator.h kernels/gpu/launch.h"
    ),
    "executor/backends/ucx_connection.h": "ucp/",
    "tests/executor/backends/liveness_lock_test.cpp": "executor/backends/liveness_lock.h",
    "executor/backends/nccl.cpp": "executor/interfaces/communicator.h nccl.h",
    "command/options.cpp": "CLI/",
    "tools/compile.cpp": "compiler/* ir",
    "tools/exec.cpp": "executor/interfaces/transport_traits.h",
    "tools/stored_files.h": "compiler/frontend llvm/",
    "tools/stored_files.cpp": "ir",
    "tools/inspect.cpp": "compiler/* base/yaml/topology.h",
}
LESS = {
    "verify/proof/regular_sets.cpp": "verify/proof/regular_sets.h",
    "verify/proof/contents.cpp": "verify/proof schema base/work_deadline.h",
    "verify/proof/plan_verifier.cpp": (
        "verify/proof verify/layout schema executor/load/load.h base/parallel.h base/work_deadline.h"
    ),
}
# Folders without a rule: their programs are built outside this tree, with the installed headers.
OUTSIDE = ("tests/package/consumer/", "examples/cpp/")
CODE = (".h", ".hpp", ".c", ".cpp", ".cu", ".def", ".fbs")
MAX_LINES = 1000


def room_of(path: str) -> str | None:
    """The innermost room that contains a file."""
    path = path.removeprefix("include/")
    return max((room for room in ROOMS if path.startswith(room + "/")), key=len, default=None)


def may_include(allowed: str, path: str) -> bool:
    room = room_of(path)
    for word in allowed.split():
        if word.endswith("/*") and path.startswith(word[:-1]):
            return True
        if path.startswith(word) if word in LIBRARIES else word in (room, path):
            return True
    return False


problems: list[str] = []
#: By namespace and name: the header that defines the type. Two types of one name in one program would
#: be one to the linker.
types: dict[tuple[str, str], str] = {}
#: The files, except tests, that name a format of checkpoints.
named: dict[str, set[str]] = {}
looked = 0
git = ["git", "-c", "safe.directory=*", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
for name in sorted(subprocess.run(git, capture_output=True, text=True, check=True).stdout.split("\0")):
    if not name.endswith((*CODE, ".py")) or not (root / name).exists():  # removed, but not from the index
        continue
    text = (root / name).read_text()
    looked += 1
    if (lines := text.count("\n")) > MAX_LINES:
        problems.append(f"{name}: {lines} lines, at most {MAX_LINES}: is it one idea?")
    if name.endswith(".py") or name.startswith(OUTSIDE):
        continue
    for format in re.findall(r"(?:StorageFormat|formats)::(\w+)", "" if name.startswith("tests/") else text):
        named.setdefault(format, set()).add(name)
    room = room_of(name)
    if not room:
        problems.append(f"{name}: no rule states what its folder may include; add a row to ROOMS")
        continue
    may = LESS[name] if name in LESS else f"{room} {ROOMS[room]} {MORE.get(name, '')}"
    if name.endswith(".h") and not name.startswith("tests/"):
        namespace = ""
        for content in text.splitlines():
            namespace = found[1] if (found := re.match(r"namespace ([\w:]+) {", content)) else namespace
            defined = re.match(r"(?:struct|class|enum class) (\w+)[^;]*{", content)
            if defined and types.setdefault((namespace, defined[1]), name) != name:
                problems.append(f"{name}: defines {namespace}::{defined[1]}, as {types[namespace, defined[1]]} does")
    for line, content in enumerate(text.splitlines(), 1):
        include = re.match(r'\s*#\s*include\s*["<]([^">]+)[">]', content)
        if include and (room_of(include[1]) or include[1].startswith(LIBRARIES)) and not may_include(may, include[1]):
            problems.append(f"{name}:{line}: may not include {include[1]} (allowed: {may.strip()})")
for format, files in named.items():  # safetensors is the default of endpoints
    if len(files) > 1 and format not in ("safetensors", "format", "MAX"):
        problems.append(f"{', '.join(files)} name the format of checkpoints {format}, expected its own file alone")
for name in MORE.keys() | LESS.keys():
    if not (root / name).exists():
        problems.append(f"{name}: has a rule but does not exist")

# The packages need nothing but Python, and reshard_record needs reshard, which does not know it: numpy and torch are
# imported where the caller has them, within functions, or in modules that only functions import.
WITH_TORCH = ("python/reshard_record/provenance.py",)
for path in sorted((root / "python").rglob("*.py")):
    looked += 1
    tree = ast.parse(path.read_text())
    for statement in ast.walk(tree):
        names = [each.name for each in statement.names] if isinstance(statement, ast.Import) else []
        if isinstance(statement, ast.ImportFrom) and not statement.level:
            names = [statement.module]
        for name in names:
            package = name.split(".")[0]
            own = path.relative_to(root / "python").parts[0]
            if (own, package) == ("reshard", "reshard_record"):
                problems.append(f"{path.relative_to(root)}:{statement.lineno}: may not import {name}, which uses it")
            if statement not in tree.body or (own, package) == ("reshard_record", "reshard"):
                continue
            # vLLM imports integrations/vllm_*.py, and uses torch.
            framework = path.parent.name == "integrations" and package in ("torch", path.stem, path.stem.split("_")[0])
            framework = framework or path.stem == package == "torch"  # reshard.torch
            framework = framework or (package == "torch" and str(path.relative_to(root)) in WITH_TORCH)
            if package not in sys.stdlib_module_names and not framework:
                problems.append(f"{path.relative_to(root)}:{statement.lineno}: may not import {name} at its top")

for command, libraries in {"exec": ("llvm::", "YAML::"), "diff": ("llvm::", "YAML::")}.items():
    binary = build / f"reshard-{command}"
    symbols = subprocess.run(["nm", "-C", str(binary)], capture_output=True, text=True, check=True).stdout
    looked += 1
    if len(symbols.splitlines()) < 100:
        problems.append(f"{binary.name}: nm found no symbols, so the test means nothing")
    for forbidden in libraries:
        if forbidden in symbols:
            problems.append(f"{binary.name}: has symbols of {forbidden}")

license = subprocess.run([sys.executable, str(root / "scripts" / "spdx.py"), "--check"], capture_output=True, text=True)
if license.returncode:
    problems += license.stdout.splitlines()[:-1] or [f"scripts/spdx.py: {license.stderr.strip()}"]

print("\n".join(problems))
if looked < 300:
    print(f"looked at {looked} files only")
    sys.exit(1)
print(f"{looked} files, {len(problems)} problems")
sys.exit(1 if problems else 0)

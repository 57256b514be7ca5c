"""Who may include whom, what the executor may link, and how long a file may be. Rules as data; run as a test:
includes.py BUILD"""

import re
import subprocess
import sys
from pathlib import Path

root = Path(__file__).resolve().parents[2]
build = Path(sys.argv[1])

# folder -> what its quoted and angled includes may start with (our own folders and the libraries that have a prefix)
OURS = ("backends/", "schema/", "ir/", "compiler/", "executor/", "kernels/", "tools/")
LIBRARIES = ("llvm/", "yaml-cpp/", "flatbuffers/", "nlohmann/", "xxhash.h", "mpi.h", "nccl.h", "cuda")
ALLOWED = {
    "schema": ("schema/", "flatbuffers/", "xxhash.h"),
    "ir": ("ir/", "llvm/"),
    "compiler": ("compiler/", "ir/", "llvm/"),
    "kernels": ("kernels/", "schema/formats.h"),
    "executor": ("executor/", "schema/", "kernels/", "flatbuffers/"),
    "backends": ("backends/", "executor/wire.h", "mpi.h"),
    "tools": ("tools/", "executor/", "schema/", "nlohmann/"),
}
# single files that may include more, and those that may include less
MORE = {
    "compiler/source.cpp": ("yaml-cpp/",),
    "compiler/job.cpp": ("xxhash.h",),
    "compiler/emit.cpp": ("schema/", "flatbuffers/"),
    "compiler/assign_buffers.cpp": ("schema/arena.h",),
    "compiler/schedule.cpp": ("schema/arena.h",),
    "ir/verify.cpp": ("schema/arena.h",),
    "kernels/copy_cuda.h": ("cuda",),
    "kernels/changes.h": ("cuda_fp8.h",),
    "kernels/change_cuda.h": ("cuda",),
    "backends/current_device.h": ("cuda",),
    "backends/cuda.cpp": ("executor/device.h", "executor/group.h", "kernels/change_cuda.h", "kernels/copy_cuda.h"),
    "backends/nccl.cpp": ("executor/group.h", "nccl.h"),
    "tools/compile.cpp": ("compiler/", "ir/"),
    "tools/inspect.cpp": ("compiler/", "ir/"),
    "tools/inspection.h": ("ir/ir.h",),
    "tools/quantize.cpp": ("kernels/quantized.h", "kernels/scales.h"),
    "tools/synthesize.cpp": ("kernels/formats.h",),
    "tools/simulate.h": ("ir/ir.h",),
}
LESS = {
    "tools/boxes.cpp": ("tools/boxes.h",),
    "tools/contents.cpp": ("tools/", "schema/"),
    "tools/coverage.cpp": ("tools/", "schema/", "executor/load.h"),
}
KNOWN_LONG: set[str] = set()
MAX_LINES = 500

problems: list[str] = []
looked = 0
for folder, allowed in ALLOWED.items():
    for path in sorted((root / folder).rglob("*")):
        if path.suffix not in (".h", ".cpp", ".cu", ".def", ".fbs"):
            continue
        name = str(path.relative_to(root))
        text = path.read_text()
        looked += 1
        may = LESS.get(name, allowed) + MORE.get(name, ())
        for line, content in enumerate(text.splitlines(), 1):
            include = re.match(r'\s*#\s*include\s*["<]([^">]+)[">]', content)
            if not include or not include[1].startswith(OURS + LIBRARIES):
                continue
            if not include[1].startswith(may):
                problems.append(f"{name}:{line}: may not include {include[1]} (allowed: {', '.join(may)})")
        lines = text.count("\n")
        if lines > MAX_LINES and name not in KNOWN_LONG:
            problems.append(f"{name}: {lines} lines, at most {MAX_LINES}: is it one idea?")

for command in ("exec", "diff"):
    binary = build / f"reshard-{command}"
    symbols = subprocess.run(["nm", "-C", str(binary)], capture_output=True, text=True, check=True).stdout
    looked += 1
    if len(symbols.splitlines()) < 100:
        problems.append(f"{binary.name}: nm found no symbols, so the test means nothing")
    for forbidden in ("llvm::", "YAML::"):
        if forbidden in symbols:
            problems.append(f"{binary.name}: has symbols of {forbidden}")

print("\n".join(problems))
if looked < 20:
    print(f"looked at {looked} files only")
    sys.exit(1)
print(f"{looked} files, {len(problems)} problems")
sys.exit(1 if problems else 0)

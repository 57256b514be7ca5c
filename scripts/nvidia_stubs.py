# SPDX-License-Identifier: Apache-2.0
"""Stubs of the NVIDIA libraries that a PyTorch is linked against, except libcudart: nvidia_stubs.py TORCH FOLDER. TORCH
is the folder of the package torch.

The libraries have 2.7 GB, and a CPU needs only libcudart. The functions of a stub return 1, an error. libcuda has no
stub, because programs detect a driver by it."""

import re
import subprocess
import sys
from pathlib import Path

torch, folder = map(Path, sys.argv[1:])
libraries = sorted((torch / "lib").glob("libtorch*.so"))


def read(*command: str) -> str:
    return subprocess.run([*command, *libraries], capture_output=True, text=True, check=True).stdout


wanted: dict[str, set[str]] = {
    name: set() for name in re.findall(r"NEEDED.*\[(lib(?:cu|nv|nccl)[^]]*)\]", read("readelf", "-dW"))
}
for name, versions in re.findall(r"File: (\S+) .*\n((?:.* Name: .*\n)*)", read("readelf", "-VW")):
    wanted.get(name, set()).update(re.findall(r"Name: (\S+)", versions))
symbols = re.findall(r" U ((?:cu|nccl|nv)\w+)(?:@(\S+))?$", read("nm", "-D"), re.MULTILINE)
for name in wanted:
    if name.startswith(("libcudart", "libcuda.so")):
        continue
    script, source = folder / "versions", folder / "stub.c"
    of = {version: {symbol for symbol, at in symbols if at == version} for version in wanted[name] or [""]}
    script.write_text(
        "".join(f"{version} {{ {' '.join(f'{symbol};' for symbol in found)} }};\n" for version, found in of.items())
    )
    source.write_text("".join(f"int {symbol}(void) {{ return 1; }}\n" for found in of.values() for symbol in found))
    more = [f"-Wl,--version-script={script}"] if wanted[name] else []
    subprocess.run(
        [
            "gcc",
            "-w",
            "-shared",
            "-nostdlib",
            "-fno-builtin",
            f"-Wl,-soname={name}",
            *more,
            "-o",
            folder / name,
            source,
        ],
        check=True,
    )
    script.unlink()
    source.unlink()

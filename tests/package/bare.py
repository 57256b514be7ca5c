# SPDX-License-Identifier: Apache-2.0
"""Compiles and runs a plan with Python's standard library alone. package_test.py runs it in a bare environment."""

import re
from array import array
from pathlib import Path

import reshard

plan = reshard.compile("halves.yaml", **{"model.dtype": "fp32"})
halves = [array("f", [1, 2, 3]), array("f", [4, 5, 6])]
whole = array("f", [0] * 6)
with reshard.Executor(plan, transport="threads") as executor:
    for rank, half in enumerate(halves):
        executor.bind({"w": half}, "source", rank)
    executor.bind({"w": whole}, "target", 0)
    executor.prepare()
    executor.run(timeout=60)
    print(executor.version, executor.state)
assert whole.tolist() == [1, 2, 3, 4, 5, 6], whole

libraries = set(re.findall(r"/(lib[^/]*\.so)", Path("/proc/self/maps").read_text()))
assert "libreshard.so" in libraries and "libstdc++.so" not in libraries, libraries

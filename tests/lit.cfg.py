# SPDX-License-Identifier: Apache-2.0
# Golden tests of the IR and the commands: `make test` runs them, `lit.py -sv build/release/tests` runs them alone.
import os

import lit.formats

config.name = "reshard"
config.test_format = lit.formats.ShTest(execute_external=False)
config.suffixes = [".rir", ".yaml", ".test"]
config.excludes = ["Inputs", "errors", "property", "bench", "fuzz", "gpu"]
config.test_source_root = os.path.dirname(__file__)
config.test_exec_root = os.path.join(config.build, "tests", "lit")
for command in ("compile", "exec", "inspect", "diff"):
    config.substitutions.append((f"%reshard-{command}", os.path.join(config.build, f"reshard-{command}")))
config.substitutions.append(("%examples", os.path.join(config.source, "examples")))
for tool in ("FileCheck", "not", "split-file", "count"):
    config.substitutions.append((f"%{tool}", os.path.join(config.llvm_tools, tool)))

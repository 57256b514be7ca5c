# SPDX-License-Identifier: Apache-2.0
"""GPU tests that need no GPU: errors for a missing backend, driver or device, and the kernels' use of registers. With a
GPU the commands run on it (tests/gpu/run.sh tests more). RESHARD_BIN: the folder of the commands."""

import json
import os
import re
import shlex
import shutil
import sys
import unittest
from pathlib import Path

from commands import BIN, ROOT, FolderTest, run
from fake_backend import copy_with_backends

GPU = Path("/dev/nvidiactl").exists()
NVCC = shutil.which("nvcc")
# Registers per thread that let three blocks of 256 threads reside on a multiprocessor, two of
# digests (kernels/gpu/*_cuda.*).
REGISTERS = {"copy": 80, "convert": 80, "digest": 128}


class Gpu(FolderTest):
    def setUp(self):
        super().setUp()
        self.compile("{tp: 4, dp: 2}", "{tp: 8}")

    def compile(self, source, target):
        model = (
            '{dtype: bf16, index: {l: 3}, tensors: {"up.{l}": {shape: [96, 64], shard: {0: tp}}, '
            '"down.{l}": {shape: [64, 96], shard: {1: tp}}, norm: [77]}}'
        )
        self.job(model, f"{{mesh: {source}}}", f"{{mesh: {target}}}")
        self.call("reshard-compile job.yaml -o plan")

    def execute(self, *options, program="reshard-exec", environment=None, code=None):
        names = ("OMPI_", "PMI_", "SLURM_", "NCCL_", "RESHARD_NCCL", "RANK", "WORLD_SIZE", "LOCAL_RANK")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(names)}
        options = ("--synthesize", "--check", "--repeat=2", "--timeout=60", *options)
        return self.call(program, "plan", *options, code=code, env=clean | (environment or {}))

    def stops(self, code, error, *options, **more):
        """A run must end with an exit code and this error alone."""
        done = self.execute(*options, **more)
        self.assertEqual((done.returncode, done.stderr.strip()), (code, f"reshard-exec: error: {error}"))

    def test_exact_on_a_gpu_and_refused_without(self):
        for world, options in (
            ("{tp: 8}", ("--device=cuda",)),
            ("{tp: 1}", ("--device=cuda", "--transport=nccl", "--no-local-shortcut")),
        ):
            self.compile(world, world.replace("8", "4"))
            done = self.execute(*options, code=0 if GPU else 3)
            if GPU:
                self.assertRegex(done.stdout, r"[1-9]\d* bytes right")
            else:
                self.assertRegex(done.stderr, r"^reshard-exec: error: no GPU: .+")

    def test_incompatible_devices_and_transports(self):
        for options, text in (
            (("--device=cuda", "--transport=mpi"), "transport 'mpi' does not run on device 'cuda', expected 'cpu'"),
            (("--transport=nccl",), "transport 'nccl' does not run on device 'cpu', expected 'cuda'"),
        ):
            self.stops(2, text, *options)

    def test_backends_that_are_missing_or_of_another_version(self):
        alone = self.folder / "alone"
        alone.mkdir()
        program = shutil.copy(BIN / "reshard-exec", alone)
        done = self.execute("--device=cuda", program=program, code=3)
        self.assertIn("no GPU: backend 'cuda' cannot be loaded: libreshard_cuda.so", done.stderr)
        backend = alone / "libreshard_cuda.so"
        other = "of reshard_open_device, expected 6; install backends and library of the same release"
        for source, text in (
            ("", f"no GPU: '{backend}' is not a backend of reshard: the function reshard_open_device is missing"),
            ("void reshard_open_device(void) {}", f"no GPU: '{backend}': found version none {other}"),
            (
                "void reshard_open_device(void) {} unsigned reshard_open_device_version = 99;",
                f"no GPU: '{backend}': found version 99 {other}",
            ),
        ):
            run("gcc -shared -fPIC -x c - -o", backend, input=source)
            self.stops(3, text, "--device=cuda", program=program)

    def test_exact_on_a_simulated_device(self):
        alone = self.folder / "alone"
        alone.mkdir()
        program = copy_with_backends(alone, backends=("cuda", "nccl"))
        one, nccl = "{tp: 1}", "--transport=nccl"
        forms = ("dtype: fp32", "quantize: mxfp8", "quantize: nvfp4")
        forms += ("quantize: {format: block_fp8, only: [up*, down*]}",)
        for source, target, options in (
            ("{tp: 4, dp: 2}", "{tp: 8}", ()),
            (one, one, (nccl,)),
            (one, one, (nccl, "--no-local-shortcut")),
            *(("{tp: 2}", f"{one}, {form}", ()) for form in forms),
            *((one, f"{one}, {form}", (nccl, "--no-local-shortcut")) for form in forms),
        ):
            with self.subTest(target=target, options=options):
                self.compile(source, target)
                done = self.execute("--device=cuda", *options, program=program, code=0)
                self.assertRegex(done.stdout, r"[1-9]\d* bytes right")
        self.compile("{tp: 2}", "{tp: 1}")
        for environment, text, code in (
            (
                {},
                "the rank of this process is unknown: pass one rank to open, or start it with a launcher that sets "
                "RANK (torchrun, mpirun, srun)",
                2,
            ),
            (
                {"RANK": "0", "WORLD_SIZE": "3"},
                "the launch has 3 processes, expected 2, one for each rank of the plan",
                2,
            ),
            ({"RANK": "0"}, "rendezvous 'env://': found RANK=0, expected WORLD_SIZE beside RANK", 2),
            ({"RANK": "0", "NCCL_COMM_ID": "localhost:1"}, "backend 'nccl': found a plan of 2 ranks, expected 1", 3),
        ):
            self.stops(code, text, "--device=cuda", "--transport=nccl", program=program, environment=environment)
        self.compile("{tp: 2, dp: 2}", "{tp: 4}")  # from files, to files
        self.call(program, "plan", "--synthesize", "--source=source")
        done = self.call(program, "plan", "--device=cuda", "--source=source", "--target=target", "--check")
        self.assertRegex(done.stdout, r"[1-9]\d* bytes right")

    @unittest.skipIf(NVCC is None, "nvcc not found: the kernels were not compiled")
    def test_the_kernels_spill_nothing(self):
        for kernel, most in REGISTERS.items():
            for architecture in ("sm_80", "sm_90"):
                with self.subTest(kernel=kernel, architecture=architecture):
                    source = f"{ROOT}/kernels/gpu/{kernel}_cuda.cu"
                    compile = f"{NVCC} -std=c++17 -arch={architecture} -I{ROOT} -cubin -Xptxas -v"
                    done = self.call(f"{compile} -o cubin {source}")
                    self.assertNotIn("warning", done.stderr)
                    counts = re.findall(
                        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr
                    )
                    registers = [int(count) for count in re.findall(r"Used (\d+) registers", done.stderr)]
                    self.assertEqual(counts, [("0", "0", "0")], done.stderr)
                    self.assertEqual(len(registers), 1, done.stderr)
                    self.assertLessEqual(registers[0], most, done.stderr)

    @unittest.skipIf(NVCC is None, "nvcc not found: the kernels were not compiled")
    def test_the_kernels_round_as_the_cpu_does(self):
        """Bits are equal to the CPU's only if each product, sum and quotient is rounded to nearest, including
        subnormals: checked in the PTX, with the flags of both builds."""
        commands = [
            shlex.split(each["command"])
            for each in json.loads((BIN / "compile_commands.json").read_text())
            if each["file"].endswith("convert_cuda.cu")
        ]
        script = re.search(r'"\$nvcc" (.*) -Xptxas', (ROOT / "tests/gpu/run.sh").read_text()).group(1).split()
        for flags in (*commands, script):
            kept = [flag for flag in flags if re.match(r"--?(fmad|ftz|prec|use_fast|O|std)", flag)]
            for architecture in ("sm_80", "sm_90"):
                with self.subTest(flags=kept, architecture=architecture):
                    source = ROOT / "kernels/gpu/convert_cuda.cu"
                    self.call(NVCC, *kept, f"-arch={architecture}", f"-I{ROOT}", "-ptx", "-o", "ptx", source)
                    instruction = r"(?:^|[{;])\s*(?:@!?%\w+ )?(\w[\w.]*\.f(?:16|32|64)\w*)\s"
                    arithmetic = set(re.findall(instruction, (self.folder / "ptx").read_text(), re.MULTILINE))
                    # These do not round.
                    arithmetic -= {"selp.f32", "setp.eq.f32", "setp.neu.f32", "setp.num.f32", "mov.f32"}
                    expected = {"add.rn.f32", "mul.rn.f32", "div.rn.f32"} | (
                        {"cvt.rn.satfinite.e4m3x2.f32"} if architecture == "sm_90" else set()
                    )
                    self.assertEqual(arithmetic, expected)

    @unittest.skipIf(
        GPU or NVCC is None or "RESHARD_SMALL" in os.environ,
        "needs nvcc, no GPU (with one, run run.sh itself), and a build without sanitizers",
    )
    def test_the_script_builds_and_its_plans_are_right(self):
        """Runs tests/gpu/run.sh up to the point where it needs a GPU, then its programs, from the same objects, on
        simulated GPUs (tests/gpu/simulated)."""
        cache = "ccache" if shutil.which("ccache") else ""
        environment = os.environ | {
            "RESHARD_FLAGS": "-O1",
            "PYTHON": sys.executable,
            "CXX": f"{cache} g++",
            "RESHARD_LAUNCHER": cache,
        }
        for script, code in (("pack.sh", 0), ("run.sh", 3)):
            run(ROOT / "tests/gpu" / script, *([BIN] if script == "pack.sh" else []), code=code, env=environment)
        if not (BIN / "tests/libsimulated_gpu.so").exists():
            self.skipTest("no NCCL: its backend was not compiled")
        packed = ROOT / "build/gpu"
        objects = sorted((packed / "bin/objects").glob("*.o"))
        cuda = ("executor_backends_cuda.cpp.o", "copy_cuda.o", "convert_cuda.o", "digest_cuda.o")
        of = {
            "libreshard_cuda.so": [path for path in objects if path.name in cuda],
            "libreshard_nccl.so": [path for path in objects if path.name == "executor_backends_nccl.cpp.o"],
        }
        of["gpu-test"] = [path for path in objects if path not in sum(of.values(), [])]
        for name, parts in of.items():
            shared, libraries = ["-shared"] if name.endswith(".so") else [], BIN / "tests"
            linked = (f"-L{libraries}", "-lsimulated_gpu", f"-Wl,-rpath,{libraries}", "-ldl", "-lpthread")
            self.call("g++", *shared, *parts, *linked, "-o", name)
        full = "RESHARD_FULL" in os.environ
        for command, folders, least, text in (
            ("graph", ("small/refresh",), 1, "memory of another device is rejected"),
            ("check", ("small/*", "check/*")[: 1 + full], 9, "bytes right"),
            ("self", ("self/*" if full else "self/[st]*",), 5, "bytes right"),
            ("ranks", ("small/*" if full else "small/[or]*",), 2, "name the missing one"),
        ):
            plans = sorted(path for folder in folders for path in packed.glob(f"plans/{folder}.rplan"))
            done = run(self.folder / "gpu-test", command, *plans)
            self.assertGreaterEqual(len(plans), least)
            self.assertEqual(done.stdout.count(text), len(plans), done.stdout)
        bench, tiny = (self.folder / "gpu-test", "bench", packed / "plans/small/relay.rplan"), {"RESHARD_TINY": "1"}
        done = run(*bench, code=None, env=os.environ | tiny)
        self.assertIn(done.returncode, (0, 1), done.stdout + done.stderr)  # the measured times have no meaning here
        line = r"^  (?:\d+|1 large entry, 100,000 small|(?:to|from) \w.*?) +\d+\.\d{3}"
        found = re.findall(line, done.stdout, re.MULTILINE)
        self.assertEqual((done.stderr, len(found)), ("", 12 + 1 + 11), done.stdout)
        self.assertRegex(done.stdout, r"host time of a replay: \d")

    @unittest.skipIf(NVCC is None or "RESHARD_SMALL" in os.environ, "needs nvcc and a build without sanitizers")
    def test_backends_are_built_if_nvcc_exists(self):
        self.assertTrue((BIN / "libreshard_cuda.so").exists())


if __name__ == "__main__":
    unittest.main()

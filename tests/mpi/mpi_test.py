# SPDX-License-Identifier: Apache-2.0
"""Plans over MPI, one process for each rank: all kinds of schedules are exact; processes that do not fit the plan are
an error, and so is a missing backend. RESHARD_BIN: the folder of the commands."""

import os
import re
import shutil
import unittest

from commands import BIN, MPI_ENVIRONMENT, MPIRUN, FolderTest, mpirun, run
from launch import Launch

WEIGHTS = {
    "dtype": "bf16",
    "index": {"layer": 3},
    "tensors": {
        "embed": [3000, 64],
        "l.{layer}.rows": {"shape": [512, 256], "shard": {"0": "tp"}},
        "l.{layer}.columns": {"shape": [512, 256], "shard": {"1": "tp"}},
        "norm": {"shape": [777], "dtype": "fp32"},
    },
}
# Source, target and options that together have every kind of schedule.
KINDS = [
    ({"mesh": {"tp": 2, "dp": 2}}, {"mesh": {"tp": 4}, "ranks": "2..5"}, {}),  # local, in place and packed
    ({"mesh": {"tp": 2, "dp": 2}}, {"mesh": {"tp": 4}, "ranks": "2..5"}, {"staging": "16KiB"}),  # many chunks
    ({"mesh": {"tp": 2}}, {"mesh": {"tp": 1, "dp": 6}, "ranks": "2..7"}, {"topology": {"ranks_per_node": 1}}),  # chains
    (
        {"mesh": {"tp": 2}},
        {"mesh": {"tp": 2, "dp": 3}, "ranks": "2..7"},
        {"staging": "32KiB", "topology": {"ranks_per_node": 2}},
    ),  # stripes, chunk by chunk
    ({"storage": "files"}, {"mesh": {"tp": 1, "dp": 6}}, {"exchange": "broadcast"}),
    ({"storage": "files"}, {"mesh": {"tp": 2, "dp": 3}}, {"exchange": "gather-rounds", "staging": "64KiB"}),
]


class Mpi(FolderTest):
    def compiled(self, model, source, target, *flags, plan="plan", **more):
        """The report of a job, None if it is refused."""
        self.job(model, source, target, **more)
        done = self.call("reshard-compile job.yaml -o", plan, "--report=report", *flags, code=None)
        if done.returncode != 0:
            return None
        return self.json("report")

    def run_plan(self, ranks, *options, plan="plan", program=None):
        program = (program or "reshard-exec", plan, "--transport=mpi", "--synthesize")
        return mpirun(ranks, *program, *options, code=None, cwd=self.folder)

    def check_bytes(self, done, wanted):
        """A run has ended, and as many bytes as are wanted are right."""
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        counts = re.findall(r"^  rank \d+: (\d+) bytes right$", done.stdout, re.MULTILINE)
        self.assertEqual(sum(map(int, counts)), wanted, done.stdout)

    def exact(self, report):
        """Runs the plan with shared memory, with private memory, of which only what the executor allocates for
        transforms is shared, and with messages only. Checks every byte and the bytes by method."""
        for options in (), ("--private-memory",), ("--no-local-shortcut",):
            done = self.run_plan(report["world"], "--check", "--repeat=2", "--timeout=60", "--report=run", *options)
            self.check_bytes(done, 2 * report["bytes"]["target"])  # with two seeds
            by = self.json("run")["bytes_by"]
            received = report["bytes"]["remote"]
            shared = {(): received, ("--private-memory",): received - by["messages_inside_host"]}.get(options, 0)
            self.assertEqual([by["shared_memory"], by["messages"]], [shared, received - shared])
            self.assertEqual(by["messages_inside_host"] > 0, options == ("--private-memory",))
            self.assertEqual(
                by["local"], report["bytes"]["local"] + report["bytes"]["storage"] + report["bytes"]["padding"]
            )

    def test_kinds_of_schedules(self):
        for source, target, options in KINDS:
            with self.subTest(source, target=target, options=options):
                report = self.compiled(WEIGHTS, source, target, options=options)
                self.assertGreater(report["messages"], 0)
                self.exact(report)

    def test_transforms(self):
        """Memory of transforms, which the executor allocates, can be mapped by local peers, and shares the arena with
        staging. The plans are compressed."""
        model = {
            "dtype": "bf16",
            "index": {"layer": 3},
            "tensors": {"l.{layer}.w": [512, 256], "b": [777]},
            "layouts": {
                "train": {
                    "params": {
                        "l.{layer}.w": {"holds": "w", "shard": {"0": "tp"}, "transform": "unpack"},
                        "b": {"holds": "b"},
                    }
                },
                "serve": {
                    "params": {
                        "l.{layer}.w": {"holds": "w", "shard": {"1": "tp"}, "transform": "pack"},
                        "b": {"holds": "b", "transform": "pack"},
                    }
                },
            },
        }
        source, target = (
            {"layout": "train", "mesh": {"tp": 2}},
            {"layout": "serve", "mesh": {"tp": 2, "dp": 2}, "ranks": "1..4"},
        )
        for options in {}, {"staging": "900KiB", "topology": {"ranks_per_node": 1}}:
            with self.subTest(options):
                self.exact(self.compiled(model, source, target, "--compress", options=options))

    @unittest.skipUnless(os.geteuid() == 0 and shutil.which("setpriv"), "needs root, to drop privileges, and setpriv")
    def test_memory_that_cannot_be_mapped_is_reported(self):
        """Ranks 2 and 3 have fewer privileges than 0 and 1, so they cannot map the memory of these and
        receive messages instead."""
        model = "{dtype: bf16, tensors: {a: {shape: [512, 256], shard: {0: tp}}}}"
        self.compiled(model, "{mesh: {tp: 2}}", "{mesh: {tp: 4}}")
        command = [BIN / "reshard-exec", "plan", "--transport=mpi", "--synthesize", "--check", "--timeout=60"]
        less = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
        done = mpirun(2, *command, "--report=run", ":", "-n", 2, *less, *command, cwd=self.folder)
        # Rank 0 copies its own quarter, rank 1 gets its quarter from rank 0, ranks 2 and 3 get theirs from rank 1.
        quarter = 512 * 256 * 2 // 4
        by = self.json("run")["bytes_by"]
        self.assertEqual(
            by,
            {"local": quarter, "shared_memory": quarter, "messages": 2 * quarter, "messages_inside_host": 2 * quarter},
        )
        for rank in range(4):
            printed = (
                f"  rank {rank}: 64.0 KiB from ranks on this host arrived as messages, because their memory cannot be "
                "mapped\n"
            )
            self.assertEqual(printed in done.stdout, rank > 1, done.stdout)

    def test_processes_and_plans_that_do_not_fit(self):
        report = self.compiled(WEIGHTS, "{mesh: {tp: 2}}", "{mesh: {tp: 1}}")
        done = self.run_plan(3)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("the channel has 3 processes, expected 2, one for each rank of the plan", done.stderr)
        self.compiled(WEIGHTS, "{mesh: {tp: 2}}", "{mesh: {tp: 2}, ranks: [1, 0]}", plan="other")
        one, two = (
            [BIN / "reshard-exec", self.folder / plan, "--transport=mpi", "--synthesize"] for plan in ("plan", "other")
        )
        done = mpirun(1, *one, ":", "-n", 1, *two, code=None)
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(
            done.stderr,
            r"plans differ: rank [01] runs plan [0-9a-f]{32}, rank [01] runs plan [0-9a-f]{32}; give the same",
        )  # the error of either rank
        self.assertIn(report["digest"], done.stderr)

    def test_a_timeout_is_reported(self):
        self.compiled(WEIGHTS, "{mesh: {tp: 2}}", "{mesh: {tp: 1}}")
        program = [BIN / "reshard-exec", self.folder / "plan", "--transport=mpi", "--synthesize", "--timeout=0.000001"]
        # mpirun may hang if a process ends in MPI_Init.
        launch = Launch(self.folder / "launch", ["mpirun"], 2, program, MPIRUN)
        self.addCleanup(launch.end)
        self.assertEqual(launch.wait(90), {0: 3, 1: 3}, launch.texts())
        self.assertEqual(launch.texts().count("timed out in MPI_Init"), 2, launch.texts())

    def test_files(self):
        """Several processes write the same folders as one process; after an error they leave nothing."""

        def over_mpi(ranks, *options):
            program = "reshard-exec plan --transport=mpi --timeout=30"
            return mpirun(ranks, program, *options, code=None, cwd=self.folder, env=MPI_ENVIRONMENT)

        for number, (source, target) in enumerate(
            (
                ("{mesh: {tp: 2}}", "{mesh: {tp: 1, dp: 2}, ranks: 1..2}"),
                ("{storage: weights}", "{mesh: {tp: 2, dp: 2}}"),
                ("{mesh: {tp: 2, dp: 2}}", "{storage: weights}"),
                ("{mesh: {tp: 2}}", "[{storage: files, mesh: {tp: 4}}, {mesh: {tp: 1, dp: 2}}]"),
            )
        ):
            with self.subTest(source, target=target):
                report = self.compiled(WEIGHTS, source, target)
                names = [self.folder / f"{name}{number}" for name in ("source", "one", "many", "wrong")]
                self.call(f"reshard-exec plan --synthesize --source={names[0]}")
                self.call(f"reshard-exec plan --source={names[0]} --target={names[1]}")
                done = over_mpi(
                    report["world"], f"--source={names[0]}", f"--target={names[2]}", "--check", "--check-replicas"
                )
                self.check_bytes(done, report["bytes"]["target"])
                run("diff -r", names[1], names[2])
                done = over_mpi(report["world"], f"--source={names[0]}", f"--target={names[2]}")
                self.assertNotEqual(done.returncode, 0)
                self.assertIn("already exists", done.stderr)
                broken = sorted(names[0].iterdir())[-1]
                broken.write_bytes(broken.read_bytes()[:-8])
                done = over_mpi(report["world"], f"--source={names[0]}", f"--target={names[3]}")
                self.assertNotEqual(done.returncode, 0)
                self.assertIn(f"'{broken}': tensor ", done.stderr)
                self.assertEqual(
                    [path.name for path in self.folder.iterdir() if "wrong" in path.name or "partial" in path.name], []
                )

    def test_an_error_of_one_process_is_the_exit_code_of_all(self):
        model = "{dtype: bf16, tensors: {a: {shape: [%d, 8], shard: {0: tp}}}}"
        for name, rows, tp in ("other", 64, 2), ("wide", 64, 8), ("large", 128, 4), ("plan", 64, 4):
            self.compiled(model % rows, "{mesh: {tp: 4}}", f"{{mesh: {{tp: {tp}}}}}", plan=name)
        for name, plan in ("source", "plan"), ("large_source", "large"):
            self.call("reshard-exec", plan, "--synthesize", f"--source={name}")
        shutil.copytree(self.folder / "source", self.folder / "wrong")
        shutil.copy(self.folder / "large_source/rank-00003.safetensors", self.folder / "wrong")
        # The index of the argument that differs (plan, source, target, other options), its value, whether all ranks get
        # it or rank 2 only, the exit code, the error.
        given = ["plan", "source", "target", "--seed=1"]
        for number, (index, value, everyone, code, error) in enumerate(
            (
                (0, "absent", False, 2, "rank 2: .*absent"),
                (0, "absent", True, 2, "absent"),
                (0, "other", False, 2, "rank [0-3] runs plan [0-9a-f]{32}, "),
                (0, "wide", False, 2, "the channel has 4 processes, expected 8"),
                (1, "absent", False, 2, "rank 2: .*absent' is not a folder"),
                (1, "wrong", True, 2, "rank 3: .*tensor 'a' has shape"),
                (2, "wrong", True, 2, "already exists"),
                (2, "absent/x", True, 2, "cannot create '"),
                (3, "--synthesize", False, 2, "rank 2: .*expected no --target"),
                (3, f"--report={self.folder}/absent/report", True, 3, "rank 0: .*cannot create"),
            )
        ):
            text = (
                'case $OMPI_COMM_WORLD_RANK in %s) set -- %s;; *) set -- %s;; esac; exec "$0" %s/$1 --transport=mpi '
                "--timeout=60 --source=%s/$2 --target=%s/$3 $4"
            )
            other = [value if each == index else name for each, name in enumerate(given)]
            program = [
                "sh",
                "-c",
                text % ("*" if everyone else "2", " ".join(other), " ".join(given), *[self.folder] * 3),
                BIN / "reshard-exec",
            ]
            with self.subTest(value, error=error):
                launch = Launch(self.folder / f"launch{number}", ["mpirun"], 4, program, {"OMPI_MCA_btl": "self,vader"})
                self.addCleanup(launch.end)
                ended = launch.wait(90)
                printed = "".join(f"rank {rank}: {launch.read(f'out.{rank}')}" for rank in range(4))
                self.assertEqual(ended, dict.fromkeys(range(4), code), printed)
                self.assertRegex(printed, error)
                # Each process prints the error, or the rank that does.
                self.assertEqual(printed.count("error: "), 4, printed)
                for _ in range((3 if index in (1, 2) else 1) if code == 2 else 0):
                    mpirun(4, *program, code=code)
                left = {path.name for path in self.folder.iterdir() if not path.name.startswith("launch")}
                self.assertEqual(
                    left - {"target"},
                    {"job.yaml", "report", "other", "wide", "large", "plan", "source", "large_source", "wrong"},
                )

    def test_files_of_the_target_need_a_folder(self):
        self.compiled(WEIGHTS, "{mesh: {tp: 2}}", "{storage: files}")
        self.fails(
            "the files of target belong to no single process, expected --source=DIR and --target=DIR instead of "
            "--synthesize",
            "reshard-exec plan --transport=mpi --synthesize",
        )

    def test_without_the_backend(self):
        self.compiled(WEIGHTS, "{mesh: {tp: 2}}", "{mesh: {tp: 1}}")
        alone = self.folder / "reshard-exec"
        shutil.copy(BIN / "reshard-exec", alone)
        text = "backend 'mpi' cannot be loaded: libreshard_mpi.so"
        self.fails(text, alone, "plan", "--transport=mpi", "--synthesize", code=3)


if __name__ == "__main__":
    unittest.main()

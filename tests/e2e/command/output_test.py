# SPDX-License-Identifier: Apache-2.0
"""Output files: devices and FIFOs are written directly, symbolic links are kept, and inputs are never overwritten.
RESHARD_BIN: the folder of the commands. Uses a device node of its own, if creating one is permitted."""

import json
import os
import stat
import subprocess
import threading
import unittest

from commands import BIN, FolderTest, run

JOB = """
version: 1
model: model.yaml
source: {mesh: {tp: 2}}
target: {mesh: {tp: 4}}
"""
MODEL = "{dtype: bf16, tensors: {a: {shape: [64, 8], shard: {0: tp}}}}\n"


class Outputs(FolderTest):
    def setUp(self):
        super().setUp()
        self.write("job.yaml", JOB)
        self.write("model.yaml", MODEL)

    def command(self, name, *arguments, code=0, **more):
        return run(f"reshard-{name}", *arguments, code=code, cwd=self.folder, timeout=60, text=False, **more)

    def test_a_device_is_not_replaced(self):
        null = self.folder / "null"
        try:
            os.mknod(null, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
            null.open("wb").close()
        except PermissionError:
            self.skipTest("creating device nodes is not permitted")
        before = self.names()
        self.command("compile", "job.yaml", "-o", null, f"--report={null}")
        self.command("compile", "job.yaml", "-o", null, "--emit=ir")
        self.assertTrue(stat.S_ISCHR(null.stat().st_mode))
        self.assertEqual(self.names(), before)

    def test_a_fifo_gets_the_bytes(self):
        self.command("compile", "job.yaml", "-o", "plan", "--report=report")
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        for arguments in (
            ["-o", pipe],
            ["-o", "other", f"--report={pipe}"],
            ["-o", pipe, "--emit=ir"],
            ["-o", pipe, "--keep=plan"],
        ):
            with self.subTest(arguments=arguments):
                got = []
                reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
                reader.start()
                self.command("compile", "job.yaml", *arguments)
                reader.join(60)
                self.assertTrue(stat.S_ISFIFO(pipe.lstat().st_mode))
                if arguments == ["-o", pipe]:
                    self.assertEqual(got[0], (self.folder / "plan").read_bytes())
                elif "--emit=ir" in arguments:
                    self.assertTrue(got[0].startswith(b"reshard") or b"source" in got[0], got[0][:80])
                elif pipe not in arguments:
                    self.assertEqual(json.loads(got[0])["world"], 4)

    def test_standard_output_is_written_to(self):
        self.command("compile", "job.yaml", "-o", "plan")
        plan = (self.folder / "plan").read_bytes()
        before = self.names()
        self.assertEqual(self.command("compile", "job.yaml", "-o", "/dev/stdout").stdout, plan)
        with (self.folder / "redirected").open("wb") as redirected:
            subprocess.run(
                [BIN / "reshard-compile", "job.yaml", "-o", "/dev/stdout"],
                cwd=self.folder,
                stdout=redirected,
                stderr=subprocess.PIPE,
                check=True,
            )
            self.assertEqual(os.fstat(redirected.fileno()).st_ino, (self.folder / "redirected").stat().st_ino)
        self.assertEqual((self.folder / "redirected").read_bytes(), plan)
        self.assertEqual(self.names(), sorted([*before, "redirected"]))

    def test_a_link_is_kept_and_its_target_is_replaced(self):
        (self.folder / "there").mkdir()
        for name in ("plan", "report", "ir"):
            (self.folder / f"{name}-link").symlink_to(f"there/{name}")
        (self.folder / "second").symlink_to("plan-link")
        for output in ("plan-link", "second", "plan-link"):
            self.command("compile", "job.yaml", "-o", output, "--report=report-link")
            self.command("compile", "job.yaml", "-o", "ir-link", "--emit=ir")
        self.command("exec", "there/plan", "--synthesize", "--check", "--report=report-link")
        for name in ("plan-link", "report-link", "ir-link", "second"):
            self.assertTrue((self.folder / name).is_symlink(), name)
        self.assertEqual(self.names("there"), ["ir", "plan", "report"])

    def test_no_input_is_overwritten(self):
        self.command("compile", "job.yaml", "-o", "plan")
        os.link(self.folder / "job.yaml", self.folder / "hard")
        (self.folder / "link").symlink_to("job.yaml")
        plan = (self.folder / "plan").read_bytes()
        before = self.names()
        for name, option, output, arguments in (
            ("compile", "-o", "job.yaml", ["job.yaml"]),
            ("compile", "-o", "./hard", ["job.yaml"]),
            ("compile", "-o", "link", ["job.yaml"]),
            ("compile", "-o", "job.yaml", ["job.yaml", "--emit=ir"]),
            ("compile", "--report", "job.yaml", ["job.yaml", "-o", "new"]),
            ("exec", "--report", "plan", ["plan", "--synthesize"]),
            ("exec", "--trace", "plan", ["plan", "--synthesize"]),
        ):
            with self.subTest(name=name, option=option, output=output):
                done = self.command(name, *arguments, option, output, code=2)
                self.assertEqual(
                    done.stderr.decode(),
                    f"reshard-{name}: error: option "
                    f"'{option}': '{output}' would overwrite the input '{arguments[0]}', expected another file\n",
                )
        for option in (["-o", "model.yaml"], ["-o", "new", "--report=model.yaml"]):
            self.assertIn(
                b"'model.yaml' would overwrite the input 'model.yaml'",
                self.command("compile", "job.yaml", *option, code=2).stderr,
            )
        (self.folder / "dangling").symlink_to("both")
        for name, option, other, arguments in (
            ("compile", "--report", "-o", ["job.yaml"]),
            ("exec", "--trace", "--report", ["plan", "--synthesize"]),
        ):
            for second in ("both", "./both", "dangling"):
                done = self.command(name, *arguments, other, "both", option, second, code=2)
                self.assertEqual(
                    done.stderr.decode(),
                    f"reshard-{name}: error: options '{other}' and '{option}' both write '{second}', "
                    "expected two files\n",
                )
        (self.folder / "dangling").unlink()
        self.assertEqual(self.names(), before)
        self.assertEqual((self.folder / "job.yaml").read_text(), JOB)
        self.assertEqual((self.folder / "model.yaml").read_text(), MODEL)
        self.assertEqual((self.folder / "plan").read_bytes(), plan)


if __name__ == "__main__":
    unittest.main()

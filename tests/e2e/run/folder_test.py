# SPDX-License-Identifier: Apache-2.0
"""Source and target folders of reshard-exec: a source file that changes during a run is an error that names the file,
the next run removes the folder of a killed process, and a target inside the source is refused. No partial output
remains. RESHARD_BIN: the folder of the commands."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
import unittest

from commands import BIN, FolderTest
from launch import Launch

JOB = """version: 1
model: {dtype: bf16, tensors: {a: {shape: [1024, 512], shard: {0: tp}}}}
source: {mesh: {tp: 2}}
target: {mesh: {tp: 4}}
"""
FOREVER = "--repeat=1000000"


class Folders(FolderTest):
    def setUp(self):
        super().setUp()
        self.write("job.yaml", JOB)
        self.command("compile", "job.yaml", "-o", "plan")
        self.make("source")

    def command(self, name, *arguments, code=0):
        return self.call(f"reshard-{name}", *arguments, code=code, timeout=60).stderr

    def make(self, source):
        self.command("exec", "plan", "--synthesize", f"--source={source}")

    def partial(self, process="*"):
        return list(self.folder.glob(f"target.partial-{process}-*"))

    def begin(self, *options, source="source"):
        """Starts a run that repeats until the process is stopped."""
        process = subprocess.Popen(
            [BIN / "reshard-exec", "plan", f"--source={source}", "--target=target", FOREVER, *options],
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        end = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < end:
            if any(list(each.glob("rank-00003.*")) for each in self.partial(process.pid)):
                time.sleep(0.3)
                return process
            time.sleep(0.002)
        self.fail("the run did not start")

    def left(self):
        return sorted(path.name for path in self.folder.iterdir())


class Changed(Folders):
    def test_truncated_source(self):
        for number, options in enumerate(([], ["--timeout=60"], ["--memory=1MiB"])):
            with self.subTest(options):
                self.make(f"source{number}")
                process = self.begin(*options, source=f"source{number}")
                file = self.folder / f"source{number}" / "rank-00001.safetensors"
                os.truncate(file, 5000)
                self.assertEqual(process.wait(20), 3)
                self.assertRegex(
                    process.stderr.read(),
                    rf"^reshard-exec: error: '{re.escape(str(file.resolve()))}': byte \d+ cannot be read: "
                    r"the file was truncated during the run and now has 5000 bytes\n$",
                )
                self.assertEqual([name for name in self.left() if name.startswith("target")], [])

    def test_over_mpi(self):
        program = [
            BIN / "reshard-exec",
            self.folder / "plan",
            f"--source={self.folder / 'source'}",
            f"--target={self.folder / 'target'}",
            FOREVER,
            "--transport=mpi",
            "--timeout=10",
        ]
        launch = Launch(self.folder / "launch", ["mpirun"], 4, program, {"OMPI_MCA_btl": "self,vader"})
        self.addCleanup(launch.end)
        end = time.monotonic() + 60
        while len([path for each in self.partial() for path in each.iterdir()]) < 4 and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.5)
        file = self.folder / "source/rank-00001.safetensors"
        os.truncate(file, 5000)
        self.assertEqual(set(launch.wait(60).values()), {3}, launch.texts())
        self.assertIn(f"'{file.resolve()}': byte ", launch.texts())
        self.assertEqual(self.partial() + list(self.folder.glob("target")), [])

    def test_source_written_or_truncated_by_less_than_a_page(self):
        """Such changes raise no signal: reads return other bytes or zeros, so the end of the run must detect them."""
        file = self.folder / "source/rank-00001.safetensors"
        for change, error in (
            (lambda: os.truncate(file, file.stat().st_size - 2), "its size was 524"),
            (file.touch, "its modification time differs"),
        ):
            with self.subTest(error):
                # A fast machine may end a run before the file changes. Then a longer run is tried.
                for repeat in 2000, 50000, 1000000:
                    self.make("new")
                    os.replace(self.folder / "new/rank-00001.safetensors", file)
                    shutil.rmtree(self.folder / "new")
                    shutil.rmtree(self.folder / "target", ignore_errors=True)
                    process = subprocess.Popen(
                        [BIN / "reshard-exec", "plan", "--source=source", "--target=target", f"--repeat={repeat}"],
                        cwd=self.folder,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                    while process.poll() is None and not self.partial(process.pid):
                        time.sleep(0.001)
                    time.sleep(0.05)
                    change()
                    printed = process.communicate(timeout=300)[0]
                    if process.returncode != 0:
                        break
                self.assertEqual(process.returncode, 3, printed)
                self.assertIn(f"'source/rank-00001.safetensors' changed during the run: {error}", printed)
                self.assertEqual(self.left(), ["job.yaml", "plan", "source"])


class Killed(Folders):
    def test_the_next_run_removes_the_folder_of_a_killed_run(self):
        process = self.begin()
        process.send_signal(signal.SIGKILL)
        process.wait()
        (dead,) = self.partial()
        self.assertFalse((self.folder / "target").exists())
        # The process number may be in use again. Folders of other targets, other hosts and live runs must not be
        # removed.
        tag = dead.name.rsplit("-", 1)[1]
        again = self.folder / f"target.partial-{os.getpid()}-{tag}"
        other = [
            self.folder / name
            for name in (
                f"target2.partial-1-{tag}",
                f"target.partial-1-{int(tag, 16) ^ 1:08x}",
                f"target.partial-x-{tag}",
                f"target.partial-2-{tag}",
            )
        ]
        again.mkdir()
        for path in other[:3]:
            path.mkdir()
        other[3].write_text("not a folder")
        alive = self.begin()
        (mine,) = self.partial(alive.pid)
        self.assertFalse(dead.exists())
        self.assertFalse(again.exists())
        self.command("exec", "plan", "--source=source", "--target=target", "--check")
        self.assertIsNone(alive.poll())
        self.assertTrue(mine.exists())
        alive.terminate()
        alive.wait(20)
        self.assertEqual(self.left(), sorted(["job.yaml", "plan", "source", "target", *[path.name for path in other]]))


class Inside(Folders):
    def test_a_target_inside_the_source_is_refused(self):
        (self.folder / "source/deep").mkdir()
        (self.folder / "link").symlink_to("source")
        (self.folder / "deep").symlink_to("source/deep")
        before = self.left(), sorted((self.folder / "source").rglob("*"))
        for source, target in (
            ("source", "source/new"),
            ("source", "source/deep/new/"),
            ("source", "link/new"),
            ("source", "deep/new"),
            ("link", "source/new"),
            ("link/", "deep/new"),
            ("source", "other/../source/new"),
            (str(self.folder / "source"), "./source//new"),
        ):
            with self.subTest(source=source, target=target):
                error = self.command("exec", "plan", f"--source={source}", f"--target={target}", code=2)
                self.assertEqual(
                    error,
                    f"reshard-exec: error: '{target}' is inside the source '{source}', expected a new folder outside "
                    "it\n",
                )
                self.assertEqual((self.left(), sorted((self.folder / "source").rglob("*"))), before)
        for target in "source", "link":
            self.assertIn(
                f"'{target}' is the source 'source', ",
                self.command("exec", "plan", "--source=source", f"--target={target}", code=2),
            )
        self.command("exec", "plan", "--source=source", "--target=source2")


class Names(Folders):
    def rename(self, old, new):
        """Renames a tensor in the header of a file."""
        path = self.folder / "source/rank-00001.safetensors"
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        header[new] = header.pop(old)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])

    def test_control_characters_are_escaped(self):
        job = JOB.replace("tensors: {", "tensors: {b: [4], ")
        self.write("more.yaml", job)
        self.command("compile", "more.yaml", "-o", "more")
        shutil.rmtree(self.folder / "source")
        self.command("exec", "more", "--synthesize", "--source=source")
        wild, shown = "b\n  all 9 bytes right\r\x1b[2J\x7f\u009b\tä", r"b\n  all 9 bytes right\r\x1b[2J\x7f\xc2\x9b\tä"
        for path in (self.folder / "source").iterdir():
            raw = path.read_bytes()
            size = int.from_bytes(raw[:8], "little")
            header = json.loads(raw[8 : 8 + size])
            header[wild] = header.pop("b")
            text = json.dumps(header).encode()
            path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
        error = self.command("exec", "plan", "--source=source", "--target=target", code=2)
        self.assertIn(f"has tensor '{shown}', which the plan does not use", error)
        self.assertEqual(error.count("\n"), 1)
        self.prints(
            f"  left out   1 tensor of the source: {shown}\n",
            "reshard-exec plan --source=source --target=target --allow=extra --report=report",
        )
        self.assertEqual(self.json("report")["omitted"], [wild])

    def test_names_with_nul_are_refused(self):
        job = JOB.replace("source: {mesh: {tp: 2}}", "source: {storage: files}")
        self.write("stored.yaml", job)
        self.command("compile", "stored.yaml", "-o", "stored")
        self.command("exec", "stored", "--synthesize", "--source=files")
        (self.folder / "files/model.safetensors").rename(self.folder / "files/model-1.safetensors")
        index = self.folder / "files/model.safetensors.index.json"
        for weights, error in (
            (
                {"a": "model-1.safetensors\0.bin"},
                "tensor 'a' has an invalid file name, expected a file in the same folder",
            ),
            ({"a\0b": "model-1.safetensors"}, r"a name contains a NUL character: 'a\x00b'"),
        ):
            with self.subTest(error):
                index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
                printed = self.command("exec", "stored", "--source=files", "--target=target", code=2)
                self.assertEqual(printed, f"reshard-exec: error: '{index.relative_to(self.folder)}': {error}\n")
        index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
        self.command("exec", "stored", "--source=files", "--target=target")
        self.rename("a", "a\0b")
        printed = self.command("exec", "plan", "--source=source", "--target=target2", code=2)
        self.assertIn(r"'source/rank-00001.safetensors': a name contains a NUL character: 'a\x00b'", printed)
        self.assertEqual([name for name in self.left() if "target2" in name], [])


if __name__ == "__main__":
    unittest.main()

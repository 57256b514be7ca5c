# SPDX-License-Identifier: Apache-2.0
"""reshard-exec --resume: a run that is killed at any moment leaves no target, and the next run continues where its
journal ends, with the bytes of an uninterrupted run. Journals that do not fit are refused. RESHARD_BIN: the
folder of the commands."""

import fcntl
import json
import os
import pty
import random
import re
import select
import shutil
import signal
import struct
import subprocess
import termios
import time
import unittest
from pathlib import Path

import numpy as np

from commands import BIN, MPIRUN, FolderTest
from torch_formats import Dcp

FULL = os.environ.get("RESHARD_FULL") == "1"
KILLS = 200 if FULL else 5
JOB = """version: 1
model:
  dtype: bf16
  index: {layer: 4}
  tensors: {"layers.{layer}.w": {shape: [2048, 1024], shard: {0: tp}}, "layers.{layer}.v": [1024, 1024]}
source: {storage: source}
target: {storage: target, mesh: {tp: 2}%s}
world: %d
"""
SIZE = 4 * 2 * (2048 * 1024 + 1024 * 1024) + 4 * 2 * 1024 * 1024  # both target ranks have `v`
DCP = JOB.replace(", shard: {0: tp}", "").replace(
    "storage: target, mesh: {tp: 2}", "storage: {folder: checkpoint, format: dcp}"
) % ("", 1)
CHUNKS = {"target": SIZE >> 20, "checkpoint": 4 * 2 * (2048 + 1024) * 1024 >> 20}  # of 1 MiB


class Resume(FolderTest):
    target = "target"  # the folder that runs write

    def setUp(self):
        super().setUp()
        self.compile("plan")
        self.call("reshard-exec plan --synthesize --source=source")

    def compile(self, plan, target="", world=1):
        self.write("job.yaml", JOB % (target, world))
        self.call("reshard-compile job.yaml -o", plan)

    def command(self, *options, plan="plan"):
        return [
            BIN / "reshard-exec",
            plan,
            f"--target={self.target}",
            "--resume",
            "--threads=1",
            "--report=report",
            *options,
        ]

    def resume(self, *options, code=0, plan="plan"):
        return self.call(*self.command(*options, plan=plan), code=code, timeout=100)

    def partial(self):
        return sorted(self.folder.glob(f"{self.target}.partial-*"))

    def journal(self, rank=0):
        (folder,) = self.partial()
        return folder / f".reshard-journal-{rank}"

    def records(self):
        """The chunks that the journal of an unfinished folder has; none without a folder, or
        before the journal is made."""
        if not self.partial() or not self.journal().exists():
            return []
        return [json.loads(line[17:])[0] for line in self.journal().read_text().splitlines()[1:]]

    def contents(self, folder=None):
        return {path.name: path.read_bytes() for path in (self.folder / (folder or self.target)).iterdir()}

    def uninterrupted(self, plan="plan", *options):
        self.call("reshard-exec", plan, "--target=whole", *options)
        return self.contents("whole")

    def killed(self, seconds=None, records=1, plan="plan", options=()):
        """Starts a run and kills it: after `seconds`, or as soon as its journal has another `records` records, which is
        at the latest before its check. Returns whether it was killed before its end."""
        before = len(self.records())
        process = subprocess.Popen(
            self.command("--check", *options, plan=plan),
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self.addCleanup(process.stderr.close)
        end = time.monotonic() + (30 if seconds is None else seconds)
        while process.poll() is None and time.monotonic() < end:
            if seconds is None:
                try:
                    lines = self.journal().read_bytes().count(b"\n")
                except (ValueError, OSError):  # not yet, or no longer
                    lines = 0
                if lines - 1 >= before + records:
                    break
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        code = process.wait(30)
        self.assertIn(code, (0, -signal.SIGKILL), process.stderr.read())
        return code != 0

    def kill(self, **options):
        """As killed(), and begins again if the run has ended before: a busy machine may see the record too late."""
        for _ in range(20):
            if self.killed(**options):
                return
            shutil.rmtree(self.folder / self.target)
        self.fail("20 runs have ended before they could be killed")


class Killed(Resume):
    def test_at_random_moments(self):
        """Two conversions, to files of ranks and to a DCP checkpoint, are killed in turns until they end: at a random
        moment between start and end, and as soon as the journal has another record, so that some kills are inside the
        copying however fast the machine is."""
        self.write("job.yaml", DCP)
        self.call("reshard-compile job.yaml -o dcp")
        jobs = [("plan", "target"), ("dcp", "checkpoint")]
        wanted, duration = {}, {}
        for plan, self.target in jobs:
            wanted[plan] = self.uninterrupted(plan)
            shutil.rmtree(self.folder / "whole")
            begin = time.monotonic()
            self.resume("--check", plan=plan)
            duration[plan] = time.monotonic() - begin
            self.ended(wanted[plan])
        rng = random.Random(time.time_ns())
        kills, inside, copying = 0, 0, 0
        while kills < KILLS:
            plan, self.target = jobs[kills % 2]
            kills += self.killed(None if kills // 2 % 2 else rng.uniform(0, duration[plan]), plan=plan)
            if (self.folder / self.target).exists():  # not killed, or after its rename
                self.ended(wanted[plan])
            elif records := self.records():
                inside += 1
                copying += records[-1] < CHUNKS[self.target]
        for plan, self.target in jobs:
            found = self.records()
            self.resume(plan=plan)
            self.assertEqual(self.json("report")["resumed_bytes"] > 0, bool(found))
            self.ended(wanted[plan])
        self.assertGreater(inside, KILLS // 8, f"{inside} of {kills} kills left a journal with copies")
        if FULL:
            self.assertGreater(copying, 0, f"{copying} of {kills} kills were inside the copying")

    def ended(self, wanted):
        """The run has written these files and left no others; the next one begins anew."""
        self.assertEqual(self.contents(), wanted)
        self.assertEqual(self.partial(), [])
        shutil.rmtree(self.folder / self.target)

    def test_the_rest_is_copied(self):
        wanted = self.uninterrupted()
        self.kill(records=1)
        done = self.records()[-1]
        self.assertGreater(done, 0)
        (folder,) = self.partial()
        for file in folder.glob("rank-*"):  # what is not copied again stays wrong
            with file.open("r+b") as stream:
                stream.seek(-4096, os.SEEK_END)
                stream.write(b"\xee" * 4096)
        text = self.resume().stdout
        self.assertRegex(text, r"resumed +[\d.]+ MiB were written by an earlier run")
        report = self.json("report")
        self.assertGreater(report["resumed_bytes"], 0)
        self.assertEqual(report["runs"][0]["bytes"] + report["resumed_bytes"], SIZE)
        self.assertEqual(self.contents().keys(), wanted.keys())
        self.assertFalse(any(name.startswith(".reshard") for name in self.contents()))

    def test_quantized(self):
        """Blocks of several rows and amax values are collected in memory, which ends with the process."""
        for format, more in (("block_fp8", ""), ("nvfp4", ""), ("mxfp8", ", scale_layout: swizzled")):
            with self.subTest(format=format):
                self.compile(format, f", quantize: {{format: {format}{more}}}")
                for folder in ("whole", "target"):
                    shutil.rmtree(self.folder / folder, ignore_errors=True)
                wanted = self.uninterrupted(format)
                self.kill(plan=format)
                self.assertGreater(self.records()[-1], 0)
                self.resume(plan=format)
                self.assertEqual(self.contents(), wanted)

    def killed_together(self, program):
        """Starts two processes and kills the first rank, whereupon mpirun ends the other, when both journals have a
        record. Returns the bytes of the last records; None if the run has ended before."""
        process = subprocess.Popen(
            program,
            cwd=self.folder,
            env=MPIRUN,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.addCleanup(process.wait)
        end = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < end:
            try:
                (folder,) = self.partial()
                journals = [path.read_text().splitlines() for path in folder.glob(".reshard-journal-*")]
                if len(journals) == 2 and min(map(len, journals)) > 1:
                    os.kill(int(folder.name.split("-")[1]), signal.SIGKILL)
                    break
            except (ValueError, OSError):  # no folder yet, or no longer
                pass
            time.sleep(0.002)
        if process.wait(60) == 0:
            return None
        (folder,) = self.partial()
        return [json.loads(path.read_text().splitlines()[-1][17:])[1] for path in folder.glob(".reshard-journal-*")]

    def test_processes(self):
        """Two processes share out the copies; each has a journal."""
        self.compile("two", world=2)
        wanted = self.uninterrupted()
        program = [
            "timeout",
            "-k10",
            "100",
            "mpirun",
            "-n",
            "2",
            *self.command("--transport=mpi", "--check", plan="two"),
        ]
        for _ in range(50):
            if found := self.killed_together(program):
                break
            shutil.rmtree(self.folder / "target")
        self.assertEqual(len(found), 2)
        self.assertFalse((self.folder / "target").exists())
        error = self.resume(code=2).stderr  # as one process
        self.assertRegex(error, "is of another run: its 'plan' is .*; without --resume a run begins anew")
        self.call(*program, env=MPIRUN)
        self.assertEqual(self.contents(), wanted)
        self.assertEqual(self.json("report")["resumed_bytes"], sum(found))
        self.assertEqual(self.partial(), [])


class Journals(Resume):
    def unfinished(self):
        self.kill(records=1)

    def test_none(self):
        self.assertRegex(self.resume().stdout, r"resumed +0 B: there was no unfinished target")

    def test_other_runs(self):
        self.unfinished()
        anew = "; without --resume a run begins anew"
        self.compile("other", ", dtype: fp32, convert: rne")
        self.refused(
            rf"'.*/\.reshard-journal-0' is of another run: its 'plan' is \"\w+\", expected \"\w+\"{anew}", plan="other"
        )
        file = self.folder / "source/model.safetensors"
        status = file.stat()
        file.touch()
        self.refused(rf"'.*' is of a run that read other files: '{re.escape(str(file))}' has changed since{anew}")
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        wanted = self.uninterrupted()
        self.resume("--check")
        self.assertEqual(self.contents(), wanted)

    def refused(self, error, *options, plan="plan"):
        before = [path.read_bytes() for folder in self.partial() for path in sorted(folder.iterdir()) if path.is_file()]
        printed = self.resume(*options, plan=plan, code=2).stderr
        self.assertRegex(printed, rf"^reshard-exec: error: {error}\n$")
        self.assertEqual(
            [path.read_bytes() for folder in self.partial() for path in sorted(folder.iterdir()) if path.is_file()],
            before,
        )
        self.assertFalse((self.folder / "target").exists())

    def test_other_objects(self):
        """Objects and small files are copied when the folder is created: a run with others cannot continue it."""
        checkpoint = Dcp(self.folder / "dcp")
        checkpoint.chunk("w", (8192, 1024), (0, 0), np.ones((8192, 1024), np.float32))
        checkpoint.object("step", b"1")
        checkpoint.write()
        (self.folder / "job.yaml").write_text("""version: 1
model: {dtype: fp32, tensors: {w: [8192, 1024]}, layouts: {same: {params: same}}}
source: {layout: same, storage: dcp}
target: {layout: same, storage: {folder: target, format: dcp}}
""")
        self.call("reshard-compile job.yaml -o objects")
        for folder, text in (("a", "{}"), ("b", "{}"), ("c", "[]")):
            (self.folder / folder).mkdir()
            self.write(f"{folder}/config.json", text)
        self.kill(plan="objects", options=("--copy=a",))
        for options in (("--copy=a", "--leave=step"), ("--copy=c",), ("--copy=a", "--rename=w=w"), ()):
            self.refused(
                r"'.*' is of another run: its 'options' is .*, expected .*; without --resume a run begins anew",
                *options,
                plan="objects",
            )
        self.resume("--check", "--copy=b", plan="objects")  # the same files in another folder, as of reshard-convert
        self.prints("  object step  ", "reshard-inspect target")

    def test_foreign_files(self):
        """What the interrupted run did not make does not get into the target, and nothing is written through a link."""
        self.unfinished()
        wanted = self.uninterrupted()
        anew = "; without --resume a run begins anew"
        outside = self.folder / "outside"
        outside.mkdir()

        def entry(name: str) -> Path:
            (folder,) = self.partial()
            return folder / name

        for make, remove in ((Path.touch, Path.unlink), (Path.mkdir, Path.rmdir)):
            make(entry("notes.txt"))
            self.refused(
                r"'.*/\.reshard-journal-0' is of a run that did not make 'notes\.txt' in the same folder; "
                rf"move it elsewhere{anew}"
            )
            remove(entry("notes.txt"))
        name = next(iter(wanted))
        moved = entry(name).rename(outside / name)
        self.refused(rf"'.*' is of a run that made '{re.escape(name)}', which is missing in the same folder{anew}")
        entry(name).symlink_to(moved)
        self.refused(
            rf"'.*' is of a run that did not make '{re.escape(name)} \(no file of its own\)' in the same "
            rf"folder; move it elsewhere{anew}"
        )
        entry(name).unlink()
        moved.rename(entry(name))
        self.resume("--check")
        self.assertEqual(self.contents(), wanted)

    def test_damaged(self):
        self.unfinished()
        journal = self.journal()
        whole = journal.read_bytes()
        lines = whole.splitlines(keepends=True)
        for number, damaged in (
            (2, lines[0] + lines[1].replace(b"[", b"[1", 1)),
            (1, b"x" + whole),
            (1, b"\0" * 40 + b"\n"),
        ):
            self.journal().write_bytes(damaged)
            self.refused(rf"'.*': line {number} is damaged; without --resume a run begins anew")
        self.journal().write_bytes(b"")
        self.refused("'.*' has no first line of a run; without --resume a run begins anew")
        wanted = self.uninterrupted()
        self.journal().write_bytes(whole + whole[:9])  # the machine stopped while a record was written
        self.resume()
        self.assertEqual(self.contents(), wanted)

    def test_folders(self):
        self.unfinished()
        (folder,) = self.partial()
        other = self.folder / "target.partial-1-00000000"
        shutil.copytree(folder, other)
        self.refused(
            f"'{other.name}' was begun on another host, where its process may still run; "
            "expected the same host for --resume. "
            f"If it does not run, rename the folder so that its name ends in '{folder.name[-9:]}'"
        )
        second = other.rename(self.folder / f"target.partial-1{folder.name[-9:]}")
        self.refused(
            f"'{second.name}' and '{folder.name}' could both be resumed, expected one unfinished folder; "
            "remove the other"
        )
        shutil.rmtree(second)
        process = subprocess.Popen(self.command("--check"), cwd=self.folder, stdout=subprocess.DEVNULL)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        end = time.monotonic() + 30
        while self.partial() == [folder] and time.monotonic() < end:
            time.sleep(0.0005)
        process.send_signal(signal.SIGSTOP)
        (mine,) = self.partial()
        self.assertIn(str(process.pid), mine.name)
        self.refused(f"cannot resume '{mine.name}': another process fills it")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        self.assertEqual(process.wait(30), -signal.SIGTERM)
        self.assertEqual(self.partial(), [mine])  # kept
        self.call("reshard-exec plan --target=target")  # without --resume
        self.assertEqual(self.partial(), [])

    def test_options(self):
        self.write("job.yaml", JOB.replace("storage: target, ", "") % ("", 2))
        self.call("reshard-compile job.yaml -o ranks")
        error = "--resume with --transport=mpi needs files that all processes share, but target has no 'storage'"
        self.fails(error, "reshard-exec ranks --resume --target=target --transport=mpi")
        for options, error in (
            (["--resume", "--synthesize"], "--resume continues the writing of files, expected no --synthesize"),
            (
                ["--resume", "--target=target", "--repeat=2"],
                "--resume continues one run on the CPU, expected no --repeat and no --device",
            ),
        ):
            self.fails(error, "reshard-exec plan", *options)


class Progress(Resume):
    def test_on_a_terminal(self):
        """Bytes, rate, time left and the tensor that is written, of a run that is long enough for a report."""
        job = (JOB % ("", 1)).replace("layer: 4", "layer: 64")
        self.write("job.yaml", job)
        self.call("reshard-compile job.yaml -o plan")
        self.call("reshard-exec plan --synthesize --source=large")
        parent, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        process = subprocess.Popen(
            [BIN / "reshard-exec", "plan", "--source=large", "--target=target", "--threads=1", "--repeat=1000"],
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=child,
        )
        os.close(child)
        shown = b""
        end = time.monotonic() + 60
        wanted = r"\rcopy \[#* *\] +\d+ % [\d.]+ \w+ of 512\.0 MiB, [\d.]+ \w+/s, \d+ (s|min) left, layers\.\d+\.[wv]"
        while process.poll() is None and time.monotonic() < end and not re.search(wanted, shown.decode()):
            if select.select([parent], [], [], 1)[0]:
                try:
                    shown += os.read(parent, 1 << 16)
                except OSError:  # the process has ended
                    break
        process.kill()
        process.wait()
        os.close(parent)
        self.assertRegex(shown.decode(), wanted)
        self.assertNotRegex(shown.decode(), r"\x1b\[[\d;]*m")  # no colors


if __name__ == "__main__":
    unittest.main()

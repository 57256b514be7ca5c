# SPDX-License-Identifier: Apache-2.0
"""A conversion in which one call of a file operation fails, for every call (tests/e2e/faults/file_faults.c): an
interrupted call and a short read or write change nothing; a full or broken device is an error that names the file; a
run that is killed at a call is continued by the next one. The source stays as it was, and the target is whole or
absent. RESHARD_BIN: the folder of the commands."""

import json
import os
import signal
import unittest
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from commands import BIN, FolderTest

FULL = os.environ.get("RESHARD_FULL") == "1"
CALLS = None if FULL else 9  # of each kind and conversion; None: all
DEADLINE = 60  # seconds
SHIM = BIN / "tests/file_faults.so"
TENSORS = {f"layers.{layer}.w": np.arange(layer, layer + 600, dtype=np.float32).reshape(20, 30) for layer in range(4)}
#: Copied unchanged, in three parts from file to file.
TENSORS["codes"] = np.arange(600 << 10, dtype=np.uint8).reshape(600, 1024)
#: Cast, and written from a buffer in three parts.
TENSORS["wide"] = np.arange(300 << 10, dtype=np.float32).reshape(300, 1024)


class FileFaults(FolderTest):
    def setUp(self):
        super().setUp()
        source = self.folder / "source"
        source.mkdir()
        names = list(TENSORS)
        for i in range(3):
            save_file({name: TENSORS[name] for name in names[2 * i : 2 * i + 2]}, source / f"model-{i}.safetensors")
        (source / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {name: f"model-{i // 2}.safetensors" for i, name in enumerate(names)}})
        )
        (source / "config.json").write_text("{}")
        model = (
            "model: {dtype: fp32, index: {layer: 4}, tensors: {'layers.{layer}.w': [20, 30], codes: {shape: [600, "
            "1024], dtype: u8}, wide: [300, 1024]}}"
        )
        for name in ("safetensors", "dcp"):
            self.write(
                "job.yaml",
                f"version: 1\n{model}\nsource: {{storage: source}}\n"
                f"target: {{storage: {{folder: out, format: {name}}}, dtype: bf16, convert: rne}}\n",
            )
            self.call("reshard-compile job.yaml -o", name)

    def contents(self, folder):
        return {
            path.name: (path.read_bytes(), path.stat().st_mtime_ns if folder == "source" else 0)
            for path in (self.folder / folder).iterdir()
        }

    def convert(self, kind, count, *options, code=None):
        """Runs the conversion. Returns it, the failed call and its file (None: no call failed), and the number of calls
        (None: the process did not end normally)."""
        log = self.folder / "log"
        log.unlink(missing_ok=True)
        done = self.call(
            "reshard-exec",
            *options,
            "--target=target",
            "--threads=1",
            code=code,
            timeout=DEADLINE,
            env=os.environ | {"LD_PRELOAD": str(SHIM), "RESHARD_FILE_FAULT": f"{kind} {count} {log}"},
        )
        lines = [line.split(" ", 1) for line in log.read_text().splitlines()] if log.exists() else []
        failed = next((line for line in lines if line[0] != "calls"), None)
        return done, failed, next((int(line[1]) for line in lines if line[0] == "calls"), None)

    def every_call(self, kind, *options):
        source = self.contents("source")
        _, _, calls = self.convert(kind, -1, *options, code=0)
        wanted = self.contents("target")
        self.assertGreater(calls, 0)
        numbers = (
            range(calls) if CALLS is None or calls <= CALLS else sorted({calls * i // CALLS for i in range(CALLS)})
        )
        for number in numbers:
            self.remove()
            done, failed, _ = self.convert(kind, number, *options)
            with self.subTest(kind=kind, number=number, failed=failed, stderr=done.stderr):
                self.assertIsNotNone(failed)
                self.assertIn(done.returncode, (-signal.SIGKILL,) if kind == "KILL" else (0, 2, 3))
                self.assertEqual(self.contents("source"), source)
                self.check(kind, done, failed, wanted, options)

    def check(self, kind, done, failed, wanted, options):
        target = self.folder / "target"
        if kind in ("EINTR", "short"):
            self.assertEqual(done.returncode, 0)
        if target.exists():
            self.assertEqual(self.contents("target"), wanted)
            self.assertEqual(list(self.folder.glob("target.partial-*")), [])
        else:
            self.assertNotEqual(done.returncode, 0)
        if "--resume" not in options:
            self.assertEqual(list(self.folder.glob("target.partial-*")), [])
        if done.returncode > 0:
            self.assertRegex(done.stderr, r"^reshard-exec: error: [^\n]*\n$")
            path = Path(failed[1])
            nameless = path.name.endswith(" (deleted)")  # until it is complete
            in_target = path.name.startswith("target.partial-") or path == self.folder
            name = "target|report" if nameless else "target" if in_target else path.name.split(".tmp-")[0]
            self.assertRegex(done.stderr, name)
        if "--resume" in options and not target.exists():  # the next run completes the target
            self.call("reshard-exec", *options, "--target=target")
            self.assertEqual(self.contents("target"), wanted)
            self.assertEqual(list(self.folder.glob("target.partial-*")), [])

    def remove(self):
        for folder in [self.folder / "target", *self.folder.glob("target.partial-*")]:
            for path in folder.iterdir() if folder.exists() else ():
                path.unlink()
            if folder.exists():
                folder.rmdir()

    def test_interrupted(self):
        self.every_call("EINTR", "safetensors", "--copy=source", "--max-shard-size=3000")
        self.remove()
        self.every_call("EINTR", "dcp", "--resume")

    def test_short(self):
        self.every_call("short", "safetensors", "--copy=source", "--resume", "--report=report")

    def test_full(self):
        self.every_call("ENOSPC", "safetensors", "--copy=source", "--max-shard-size=3000")
        self.remove()
        self.every_call("ENOSPC", "dcp", "--resume")

    def test_broken(self):
        self.every_call("EIO", "safetensors", "--copy=source", "--max-shard-size=3000")
        self.remove()
        self.every_call("EIO", "dcp", "--resume", "--report=report")

    def test_killed(self):
        self.every_call("KILL", "dcp", "--resume")

    def test_no_sync(self):
        """Neither the files nor their folders are synced."""

        def called(*options):
            _, _, calls = self.convert("EIO", -1, "dcp", *options, code=0)
            names = set()
            for number in range(calls):
                self.remove()
                names.add(self.convert("EIO", number, "dcp", *options)[1][0])
            self.remove()
            return names

        names = called()
        self.assertEqual({name for name in names if "sync" in name}, names - called("--no-sync"))
        self.assertIn("fsync", names)
        self.fails("expected no --synthesize", "reshard-exec dcp --synthesize --no-sync")
        self.fails("expected no --no-sync", "reshard-exec dcp --target=target --resume --no-sync")


if __name__ == "__main__":
    unittest.main()

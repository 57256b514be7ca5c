# SPDX-License-Identifier: Apache-2.0
"""What the commands show on a terminal only: progress of long work, and colors, which NO_COLOR turns off. The terminal
is a pseudo-terminal. Progress is shown after a second, by a clock that runs 50 times as fast: faults/fast_clock.c.
RESHARD_BIN: the folder of the commands."""

import json
import os
import pty
import subprocess
import unittest

from commands import BIN, DEADLINE, ROOT, FolderTest

FULL = "RESHARD_FULL" in os.environ
FAST = {"LD_PRELOAD": str(BIN / "tests/fast_clock.so")}
KIMI = ROOT / "examples/kimi-k2-256-to-128.yaml"
TOPOLOGY = ROOT / "examples/topologies/h100x8.yaml"


class Terminal(FolderTest):
    def shown(self, *command, code=0, **environment):
        """What a command prints on a terminal that is its standard error."""
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [str(BIN / command[0]), *map(str, command[1:])],
            stdout=subprocess.DEVNULL,
            stderr=theirs,
            cwd=self.folder,
            env={name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
            | {"TERM": "xterm"}
            | environment,
        )
        os.close(theirs)
        text = b""
        try:
            while chunk := os.read(ours, 4096):
                text += chunk
        except OSError:  # EIO: the command has closed the terminal
            pass
        finally:
            os.close(ours)
        self.assertEqual(process.wait(timeout=DEADLINE), code, text)
        return text.decode()

    def progress(self, what, *command, code=0):
        """The command shows a line that begins with `what` again and again, and removes it."""
        if "RESHARD_SMALL" in os.environ:
            self.skipTest("a sanitizer's runtime must be loaded first")
        text = self.shown(*command, code=code, **FAST)
        self.assertIn("\r" + what, text)
        last = text.rindex("\r" + what)
        self.assertIn("\r\033[K", text[last:], "the line is removed")

    def test_colors(self):
        self.write(
            "job.yaml",
            "version: 1\nmodel: {dtype: bf16, tensors: {w: [fnn]}}\nsource: {mesh: {}}\ntarget: {mesh: {}}\n",
        )
        for command, word in (
            (("reshard-compile", "job.yaml", "-o", "p"), "\033[1;31merror:\033[0m unknown name"),
            (("reshard-inspect", "absent"), "reshard-inspect: \033[1;31merror:\033[0m "),
        ):
            with self.subTest(command=command[0]):
                plain = self.call(*command, code=2).stderr
                text = self.shown(*command, code=2).replace("\r\n", "\n")
                self.assertIn(word, text)
                self.assertNotIn("\033", plain)
                self.assertEqual(text.replace("\033[1;31m", "").replace("\033[0m", ""), plain)
                for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
                    self.assertEqual(self.shown(*command, code=2, **environment).replace("\r\n", "\n"), plain)
                self.assertIn(word, self.shown(*command, code=2, NO_COLOR=""))

    def test_verify(self):
        self.call("reshard-compile", KIMI, f"--set=options.topology={TOPOLOGY}", "-o", "p")
        self.progress("verify [", "reshard-inspect", "p", "--verify")

    def test_reports(self):
        self.call("reshard-compile", KIMI, f"--set=options.topology={TOPOLOGY}", "-o", "p")
        self.progress("simulate [", "reshard-inspect", "p", f"--simulate={TOPOLOGY}")
        self.progress(
            "simulate [", "reshard-inspect", "p", f"--simulate={TOPOLOGY}", "--format=html", "-o", "page.html"
        )

    def test_compile(self):
        self.progress("compile [", "reshard-compile", KIMI, "-o", "p", "--jobs=1", "--verify-each")

    @unittest.skipUnless(FULL, "RESHARD_FULL is not set: takes a minute")
    def test_exec(self):
        self.write(
            "job.yaml",
            "version: 1\nmodel: {dtype: bf16, tensors: {w: {shape: [32768, 16384], shard: {0: x}}}}\n"
            "source: {mesh: {x: 2}}\ntarget: {mesh: {copy: 12}, ranks: 2..13, quantize: nvfp4}\n",
        )
        self.call("reshard-compile job.yaml -o p")
        text = self.shown("reshard-exec", "p", "--synthesize", "--check", "--threads=1")
        for line in ("synthesize [", "run: 1 s", "check ["):
            self.assertIn("\r" + line, text)
        self.assertTrue(text.endswith("\r\033[K"), text[-80:])

    def test_digest(self):
        header = json.dumps(
            {f"w{i}": {"dtype": "U8", "shape": [1 << 28], "data_offsets": [i << 28, (i + 1) << 28]} for i in range(4)}
        ).encode()
        with open(self.folder / "w.safetensors", "wb") as file:  # of zeros that need no disk
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + (4 << 28))
        self.progress("digest [", "reshard-digest", "w.safetensors")


if __name__ == "__main__":
    unittest.main()

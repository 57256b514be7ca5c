# SPDX-License-Identifier: Apache-2.0
"""Texts that the commands make from their tables of flags: --help, the manual page, the completions of shells."""

import re
import shutil
import subprocess
import unittest

from commands import FolderTest, run

COMMANDS = ("reshard-compile", "reshard-exec", "reshard-inspect", "reshard-diff", "reshard-digest")


class Help(FolderTest):
    def flags(self, command):
        """The flags that --help lists."""
        found = re.findall(r"^  (--?[a-z-]+)(=\S+)?", run(command, "--help").stdout, re.MULTILINE)
        self.assertGreater(len(found), 5)
        return found

    def test_all_have_all_flags(self):
        for command in COMMANDS:
            for name, value in self.flags(command):
                with self.subTest(command=command, flag=name):
                    long = name.startswith("--")
                    self.assertIn(f".B {(name + value).replace('-', chr(92) + '-')}\n", run(command, "--manual").stdout)
                    self.assertRegex(
                        run(command, "--completion=bash").stdout, rf'[ "]{name}{"=" if value and long else ""}[ "]'
                    )
                    self.assertIn(f"'*{name}{'=' if value and long else ''}[", run(command, "--completion=zsh").stdout)
                    self.assertIn(
                        f" {'-l' if long else '-s'} {name.lstrip('-')} ", run(command, "--completion=fish").stdout
                    )

    def test_manual_page(self):
        for command in COMMANDS:
            self.write("page.1", run(command, "--manual").stdout)
            if shutil.which("groff"):
                done = subprocess.run(
                    ["groff", "-man", "-ww", "-Tascii", self.folder / "page.1"],
                    capture_output=True,
                    text=True,
                    check=True,
                )
                self.assertEqual(done.stderr, "")
                self.assertIn("EXIT STATUS", re.sub(r".\x08|\x1b\[\d*m", "", done.stdout))

    def test_bash_completes(self):
        script = self.folder / "c.bash"
        script.write_text(run("reshard-inspect --completion=bash").stdout)
        (self.folder / "a.rplan").touch()
        call = (
            f"cd {self.folder}; compopt() {{ :; }}; . {script}; _reshard_inspect reshard-inspect %s reshard-inspect; "
            f'echo "${{COMPREPLY[@]}}"'
        )
        complete = lambda word: subprocess.run(
            ["bash", "-c", call % word], capture_output=True, text=True, check=True
        ).stdout.strip()
        self.assertEqual(complete("--for"), "--format=")
        self.assertEqual(complete("a.r"), "a.rplan")
        (self.folder / "with space").touch()
        self.assertEqual(complete("with"), "with space")
        self.assertEqual(complete("--nothing"), "")

    def test_an_unknown_shell(self):
        self.assertIn("csh", run("reshard-exec --completion=csh", code=2).stderr)


if __name__ == "__main__":
    unittest.main()

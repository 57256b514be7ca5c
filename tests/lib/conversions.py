# SPDX-License-Identifier: Apache-2.0
"""Runs reshard-convert in tests, from the command line."""

import os
import subprocess

import numpy as np
from safetensors.numpy import load_file

from commands import CONVERT, FolderTest, shared_folder, words_of
from module import install


class ConvertTest(FolderTest):
    """A test of reshard-convert, which runs in self.folder."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.module = shared_folder(cls)
        cls.environment = os.environ | {"PYTHONPATH": str(install(cls.module))}

    def convert(
        self, *arguments: object, code: int | None = 0, stdout: int = subprocess.PIPE
    ) -> subprocess.CompletedProcess:
        """Runs reshard-convert with arguments, and expects an exit code (None: any). The first argument may be several
        words."""
        done = subprocess.run(
            [*CONVERT, *words_of(*arguments)],
            cwd=self.folder,
            env=self.environment,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
        if code is not None:
            self.assertEqual(done.returncode, code, f"{done.stdout}{done.stderr}")
        # Errors are in the terms of the user, not in those of the job and the files that the command made.
        self.assertNotRegex(done.stderr, r"Traceback|job\.yaml|convert\.rplan|reshard-compile: error")
        return done

    def start(
        self, *arguments: object, environment: dict[str, str] | None = None, **options: object
    ) -> subprocess.Popen:
        """Starts reshard-convert, which ends with the test."""
        process = subprocess.Popen(
            [*CONVERT, *words_of(*arguments)], cwd=self.folder, env=self.environment | (environment or {}), **options
        )
        self.addCleanup(process.kill)
        return process

    def converts(self, expected: str, *arguments: object) -> str:
        """Runs reshard-convert, whose output must have a text. Returns the output."""
        text = self.convert(*arguments).stdout
        self.assertIn(expected, text)
        return text

    def cannot_convert(self, expected: str, *arguments: object, code: int = 2) -> str:
        """Runs reshard-convert, which must end with an exit code, and with a text in its errors. Returns the errors."""
        text = self.convert(*arguments, code=code).stderr
        self.assertIn(expected, text)
        return text

    def check(self, path: str, wanted: dict[str, np.ndarray]) -> None:
        """The tensors of a folder of safetensors."""
        found = load_file(self.folder / path / "model.safetensors")
        self.assertEqual(found.keys(), wanted.keys())
        for name, array in wanted.items():
            self.assertEqual(found[name].dtype, array.dtype, name)
            np.testing.assert_array_equal(found[name], array, name)

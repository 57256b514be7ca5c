# SPDX-License-Identifier: Apache-2.0
"""The official safetensors package reads target files with the right names, shapes and values: those of the source
files, assembled with NumPy as the quickstart's YAML says. RESHARD_BIN: the folder of the commands; needs numpy and
safetensors."""

import json
import tempfile
import unittest
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from commands import ROOT, run


def load(path: Path) -> dict[str, np.ndarray]:
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


class Safetensors(unittest.TestCase):
    def run_job(self, options: list[str], source: dict[str, dict[str, np.ndarray]]) -> dict[str, dict[str, np.ndarray]]:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            (work / "source").mkdir()
            for name, tensors in source.items():
                save_file(tensors, work / "source" / name)
            run("reshard-compile", *options, "-o", work / "p.rplan", cwd=ROOT)
            run("reshard-exec", work / "p.rplan", f"--source={work / 'source'}", f"--target={work / 'target'}")
            return {path.name: load(path) for path in sorted((work / "target").iterdir())}

    def test_quickstart(self) -> None:
        rng = np.random.default_rng(0)
        hidden, ffn, layers = 16, 32, 2
        up = [rng.standard_normal((ffn, hidden)).astype(np.float16) for _ in range(layers)]
        down = [rng.standard_normal((hidden, ffn)).astype(np.float16) for _ in range(layers)]
        norm = [rng.standard_normal(hidden).astype(np.float16) for _ in range(layers)]

        def shards(tp: int, ranks: int) -> dict[str, dict[str, np.ndarray]]:
            files = {}
            for rank in range(ranks):
                t = rank % tp
                files[f"rank-{rank:05d}.safetensors"] = {
                    key: value
                    for layer in range(layers)
                    for key, value in {
                        f"layers.{layer}.up.weight": np.ascontiguousarray(np.split(up[layer], tp, axis=0)[t]),
                        f"layers.{layer}.down.weight": np.ascontiguousarray(np.split(down[layer], tp, axis=1)[t]),
                        f"layers.{layer}.norm.weight": norm[layer],
                    }.items()
                }
            return files

        sets = [
            "--set",
            "model.dtype=fp16",
            "--set",
            f"model.let.hidden={hidden}",
            "--set",
            f"model.let.ffn={ffn}",
            "--set",
            f"model.index.layer={layers}",
        ]
        found = self.run_job(["examples/quickstart.yaml", *sets], shards(4, 8))
        expected = shards(8, 8)
        self.assertEqual(list(found), list(expected))
        for name, tensors in expected.items():
            self.assertEqual(set(found[name]), set(tensors))
            for key, value in tensors.items():
                np.testing.assert_array_equal(found[name][key], value)
                self.assertEqual(found[name][key].dtype, value.dtype)

    def test_checkpoint_in_several_files(self) -> None:
        """A Hugging Face checkpoint of an index and its files: a tied weight may be omitted, and a file outside the
        folder is refused."""
        rng = np.random.default_rng(1)
        embed, up = rng.integers(0, 99, (6, 4), dtype=np.int16), rng.integers(0, 99, (4, 4), dtype=np.int16)
        job = {
            "version": 1,
            "source": {"storage": "x"},
            "target": {"mesh": {"tp": 2}, "layout": "serve"},
            "model": {
                "dtype": "i16",
                "tensors": {"embed": [6, 4], "up": [4, 4], "head": {"tied": "embed"}},
                "layouts": {
                    "serve": {
                        "params": {
                            "e": {"holds": "embed", "shard": {"0": "tp"}},
                            "h": {"holds": "head"},
                            "u": {"holds": "up"},
                        }
                    }
                },
            },
        }
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            (work / "source").mkdir()
            (work / "job.yaml").write_text(json.dumps(job))
            save_file({"embed": embed}, work / "source" / "model-00001-of-00002.safetensors")
            save_file({"up": up}, work / "source" / "model-00002-of-00002.safetensors")
            index = work / "source" / "model.safetensors.index.json"
            weights = {"embed": "model-00001-of-00002.safetensors", "up": "model-00002-of-00002.safetensors"}
            index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
            run("reshard-compile", work / "job.yaml", "-o", work / "p.rplan")
            command = [
                "reshard-exec",
                work / "p.rplan",
                f"--source={work / 'source'}",
                f"--target={work / 'target'}",
                "--check",
            ]
            run(*command)
            found = load(work / "target" / "rank-00001.safetensors")
            np.testing.assert_array_equal(found["e"], embed[3:])
            np.testing.assert_array_equal(found["h"], embed)
            np.testing.assert_array_equal(found["u"], up)
            for wrong, message in (
                ({**weights, "up": "../up.safetensors"}, "expected a file in the same folder"),
                ({**weights, "up": weights["embed"]}, "the index lists 2"),
                ({"embed": weights["embed"]}, "lacks 'up': add its tensors to the index"),
            ):
                index.write_text(json.dumps({"weight_map": wrong}))
                again = run(*command[:3], f"--target={work / 'again'}", code=2)
                self.assertIn(message, again.stderr)
                self.assertFalse((work / "again").exists())


if __name__ == "__main__":
    unittest.main()

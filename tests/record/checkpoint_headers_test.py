# SPDX-License-Identifier: Apache-2.0
"""Headers of checkpoints: one file, several files with an index, and damaged ones."""

from __future__ import annotations

import json
import struct
import unittest

from record_support import temporary_folder

import numpy

import reshard
from reshard.dtypes import numpy_dtype
from reshard_record.checkpoint import tensors_of
from reshard_record.digits import write_checkpoint


class Checkpoint(unittest.TestCase):
    def test_files(self):
        wanted = {"a": ("bf16", (2, 3)), "b": ("fp8_e4m3", ()), "c": ("i64", (0, 4))}
        arrays = {name: numpy.zeros(shape, numpy_dtype(dtype)) for name, (dtype, shape) in wanted.items()}
        with temporary_folder() as folder:
            write_checkpoint(folder, arrays.items())
            self.assertEqual(tensors_of(folder), wanted)
            (folder / "model.safetensors").rename(folder / "one.safetensors")
            write_checkpoint(folder, {"d": arrays["a"]}.items())
            (folder / "model.safetensors").rename(folder / "two.safetensors")
            (folder / "other.safetensors").write_bytes(b"not of this checkpoint")
            (folder / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": dict.fromkeys("abc", "one.safetensors") | {"d": "two.safetensors"}})
            )
            self.assertEqual(tensors_of(folder), wanted | {"d": ("bf16", (2, 3))})
        self.assertEqual(tensors_of(wanted), wanted)

    def test_errors(self):
        def file(header):
            text = header if isinstance(header, bytes) else json.dumps(header).encode()
            return struct.pack("<Q", len(text)) + text

        cases = {
            "the header has 0 bytes": {"model.safetensors": b"123"},
            "expected 2 to 104857600": {"model.safetensors": struct.pack("<Q", 1 << 60)},
            "not JSON": {"model.safetensors": file(b"{]")},
            "JSON of type list, expected an object": {"model.safetensors": file([])},
            "tensor a has no shape": {"model.safetensors": file({"a": {"dtype": "BF16"}})},
            "tensor a has dtype F4, expected one of": {"model.safetensors": file({"a": {"dtype": "F4", "shape": [2]}})},
            "tensor a is also in another file": dict.fromkeys(
                ("x.safetensors", "y.safetensors"), file({"a": {"dtype": "BF16", "shape": [2]}})
            ),
            "no map weight_map": {"model.safetensors.index.json": b"{}"},
            "x.safetensors: no such file, which model.safetensors.index.json names": {
                "model.safetensors.index.json": b'{"weight_map": {"a": "x.safetensors"}}'
            },
            "no safetensors files": {},
        }
        for text, files in cases.items():
            with self.subTest(text=text), temporary_folder() as folder:
                for name, content in files.items():
                    (folder / name).write_bytes(content)
                self.assertRaisesRegex(reshard.Error, text, tensors_of, folder)
        with self.assertRaisesRegex(reshard.Error, "tensor a has dtype 'bfloat16', expected one of bf16"):
            tensors_of({"a": ("bfloat16", (2,))})


if __name__ == "__main__":
    unittest.main()

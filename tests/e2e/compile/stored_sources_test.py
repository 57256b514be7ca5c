# SPDX-License-Identifier: Apache-2.0
"""Jobs whose source or target is a checkpoint of torch.distributed.checkpoint, its safetensors form or torch.save:
every byte, with chunks that differ from layer to layer, and the errors of checkpoints that do not fit the job or the
plan. tests/frameworks/checkpoint_formats_test.py does the same with the files of the real packages."""

import itertools
import pickle
import shutil
import unittest
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from commands import FolderTest, mpirun
from torch_formats import Dcp, archive, safetensors, tensor

LAYERS = 4
MODEL = """
dtype: fp32
index: {layer: 4}
tensors:
  embed: [6, 5]
  layers.{layer}.up: [7, 5]
  layers.{layer}.codes: {shape: [3, 4], dtype: i64}
  layers.{layer}.fused: [4, 3]
  head: {tied: embed}
  scale: []
  none: {shape: [0, 4], dtype: u8}
layouts:
  saved:
    params:
      model.embed: {holds: embed}
      model.layers.{layer}.up: {holds: "layers.{layer}.up"}
      model.layers.{layer}.codes: {holds: "layers.{layer}.codes"}
      model.stacked: {holds: "layers.{layer}.fused", stack: layer}
      model.head: {holds: head}
      model.scale: {holds: scale}
      model.none: {holds: none}
  hf: {params: same}
  tp:
    axes: [tp]
    params: same
    shard: {"*.up": {1: {axis: tp, sizes: [2, 3]}}, "*.codes": {0: {axis: tp, sizes: [1, 2]}}}
"""


SAVED, HF = "{layout: saved, storage: dcp}", "{layout: hf, storage: hf}"
MEGATRON = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'  # metadata.json


def stored(format: str, folder: str = "out", layout: str = "hf", more: str = "") -> str:
    """An endpoint in a format. more: further keys of `storage`."""
    return f"{{layout: {layout}, storage: {{folder: {folder}, format: {format}{more}}}}}"


def values() -> dict[str, np.ndarray]:
    """The tensors of the model by the names of layout `saved`; the layers of `fused` are stacked."""
    rng = np.random.default_rng(7)
    result = {
        "model.embed": rng.standard_normal((6, 5)).astype(np.float32),
        "model.scale": np.array(2.5, np.float32),
        "model.none": np.zeros((0, 4), np.uint8),
        "model.stacked": rng.standard_normal((LAYERS, 4, 3)).astype(np.float32),
    }
    for layer in range(LAYERS):
        result[f"model.layers.{layer}.up"] = rng.standard_normal((7, 5)).astype(np.float32)
        result[f"model.layers.{layer}.codes"] = rng.integers(-(2**60), 2**60, (3, 4))
    return result


def chunks(name: str, shape: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    """The boxes of a tensor, each as (begin, end) of every dimension. Layer 2 is stored whole, codes in a grid."""
    whole = tuple((0, length) for length in shape)
    if name.endswith(".up") and ".2." not in name:
        return [((a, b), (0, 5)) for a, b in ((0, 3), (3, 6), (6, 7))]
    if name.endswith(".codes"):
        return [((a, b), (c, d)) for c, d in ((0, 3), (3, 4)) for a, b in ((0, 2), (2, 3))]
    if name == "model.stacked":
        return [((layer, layer + 1), (a, b), (0, 3)) for layer in range(LAYERS) for a, b in ((0, 1), (1, 4))]
    return [whole]


def grid(array: np.ndarray, limit: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The offsets and lengths of the chunks in which a target stores a tensor."""
    lengths, size = list(array.shape), array.nbytes
    for d in range(array.ndim):
        if size <= limit:
            break
        size //= array.shape[d]
        lengths[d] = max(1, limit // size)
    starts = [range(0, max(full, 1), max(length, 1)) for full, length in zip(array.shape, lengths)]
    return [
        (at, tuple(min(length, full - begin) for begin, length, full in zip(at, lengths, array.shape)))
        for at in itertools.product(*starts)
    ]


def expected() -> dict[str, np.ndarray]:
    """The tensors by their own names."""
    result = {}
    for name, array in values().items():
        if name == "model.stacked":
            result |= {f"layers.{layer}.fused": array[layer] for layer in range(LAYERS)}
        else:
            result[name.removeprefix("model.")] = array
    result["head"] = result["embed"]
    return result


class StoredSources(FolderTest):
    def setUp(self) -> None:
        super().setUp()
        self.write("model.yaml", MODEL)

    def dcp(self, leave_out: str = "", **objects: bytes) -> Path:
        checkpoint = Dcp(self.folder / "dcp")
        for name, array in values().items():
            for i, box in enumerate(chunks(name, array.shape)):
                part = np.ascontiguousarray(array[tuple(slice(*ends) for ends in box)])
                if name != leave_out:
                    at, lengths = tuple(begin for begin, _ in box), [end - begin for begin, end in box]
                    checkpoint.chunk(name, array.shape, at, part.reshape(lengths), f"__{i}_0.distcp")
        for name, data in objects.items():
            checkpoint.object(name, data)
        checkpoint.write()
        return self.folder / "dcp"

    def dcp_safetensors(self) -> Path:
        folder = self.folder / "shards"
        folder.mkdir()
        files: dict[int, tuple[dict, dict]] = {}
        for name, array in values().items():
            for i, box in enumerate(chunks(name, array.shape)):
                tensors, offsets = files.setdefault(i, ({}, {}))
                tensors[name] = np.ascontiguousarray(array[tuple(slice(*ends) for ends in box)]).reshape(
                    [b - a for a, b in box]
                )
                offsets[name] = [begin for begin, _ in box]
        for i, (tensors, offsets) in files.items():
            safetensors(folder / f"shard-{i + 1:05d}-model-00001-of-00001.safetensors", tensors, offsets)
        return folder

    def torch_save(self, name: str = "saved.pt", **more: object) -> Path:
        path, arrays = self.folder / name, values()
        tensors = {name: tensor(array, str(i)) for i, (name, array) in enumerate(arrays.items())}
        path.write_bytes(archive(tensors | more, list(arrays.values())))
        return path

    def compile(self, source: str = SAVED, target: str = HF, code: int = 0) -> str:
        self.job("model.yaml", source, target)
        return self.call("reshard-compile job.yaml -o p.rplan", code=code).stderr

    def refused(self, error: str, source: str = SAVED, target: str = HF) -> str:
        """Compiles a job, which must fail with an error. Returns all that was said."""
        text = self.compile(source, target, code=2)
        self.assertIn(error, text)
        return text

    def execute(self, *options: str, code: int = 0) -> str:
        return self.call("reshard-exec p.rplan", *options, code=code).stderr

    def stops(self, error: str, *options: str, code: int = 2) -> str:
        """Runs the plan, which must fail with an error."""
        return self.fails(error, "reshard-exec p.rplan", *options, code=code)

    def moves(self, source: str = SAVED, *options: str) -> None:
        """A job from the source to safetensors is right."""
        self.compile(source)
        self.execute("--check", *options)
        self.written("hf", expected())

    def written(self, folder: str, wanted: dict[str, np.ndarray]) -> None:
        """A run has written these arrays."""
        self.check(load_file(self.folder / folder / "model.safetensors"), wanted)

    def check(self, found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
        self.assertEqual(found.keys(), wanted.keys())
        for name, array in wanted.items():
            self.assertEqual((found[name].dtype, found[name].shape), (array.dtype, array.shape), name)
            np.testing.assert_array_equal(found[name], array, name)

    def test_every_format_as_a_source(self):
        for path in (self.dcp(), self.dcp_safetensors(), self.torch_save()):
            with self.subTest(path=path.name):
                self.compile(f"{{layout: saved, storage: {path.name}}}", HF)
                self.call("reshard-inspect p.rplan --verify")
                self.execute(f"--target={path.name}-hf", "--check")
                self.written(f"{path.name}-hf", expected())

    def test_a_source_for_ranks(self):
        self.dcp()
        self.compile(SAVED, "{layout: tp, storage: ranks, mesh: {tp: 2}}")
        self.execute("--check")
        found = [load_file(self.folder / "ranks" / f"rank-{rank:05d}.safetensors") for rank in (0, 1)]
        wanted = expected()
        for rank, (columns, rows) in enumerate(((slice(0, 2), slice(0, 1)), (slice(2, 5), slice(1, 3)))):
            local = {
                name: array[:, columns] if name.endswith(".up") else array[rows] if name.endswith(".codes") else array
                for name, array in wanted.items()
            }
            self.check(found[rank], {name: array.copy() for name, array in local.items()})

    def test_every_format_as_a_target(self):
        self.dcp()
        for format in ("dcp", "dcp-safetensors", "megatron", "torch-save"):
            for limit in ("1GB", "300"):
                with self.subTest(format=format, limit=limit):
                    out = f"{format}-{limit}"
                    self.compile(SAVED, stored(format, "x"))
                    self.execute(f"--target={out}", f"--max-shard-size={limit}", "--check")
                    files = {*self.names(out)} - {".metadata", "metadata.json", "common.pt"}
                    self.assertEqual(len(files) > 1, limit == "300" and format != "torch-save")
                    self.compile(stored(format, out), HF)
                    self.execute(f"--target={out}-hf", "--check", *self.extra(format))
                    self.written(f"{out}-hf", expected())

    def extra(self, format: str) -> list[str]:
        """The option for the common.pt of a source."""
        return ["--allow=extra"] if format == "megatron" else []

    def test_a_target_in_chunks(self):
        """`chunk` limits the chunks of a tensor: its first dimension is cut, and the next one if one
        position of it is larger."""
        self.dcp()
        self.compile(SAVED, "{layout: tp, storage: ranks, mesh: {tp: 2}}")
        self.execute()
        ranks = "tp, mesh: {tp: 2}"
        cases = [("saved, storage: dcp", 1, limit) for limit in (1, 16, 40, 100)]
        cases += [(ranks, 1, 16), (ranks, 2, 16)]
        for format in ("dcp", "megatron"):
            for source, processes, limit in cases:
                with self.subTest(format=format, limit=limit, source=source, processes=processes):
                    for folder in ("out", "hf"):
                        shutil.rmtree(self.folder / folder, ignore_errors=True)
                    self.compile(f"{{layout: {source}}}", stored(format, more=f", chunk: {limit}"))
                    self.call("reshard-inspect p.rplan --verify")
                    options = ["--check", *(["--source=ranks"] if source == ranks else [])]
                    if processes > 1:
                        mpirun(2, "reshard-exec p.rplan --transport=mpi", *options, cwd=self.folder)
                    else:
                        self.execute(*options)
                    listing = self.listing("out")["tensors"]
                    for name, array in expected().items():
                        found = [
                            (tuple(chunk["offsets"]), tuple(chunk["lengths"])) for chunk in listing[name]["chunks"]
                        ]
                        self.assertEqual(found, grid(array, limit), name)
                    self.compile(stored(format), HF)
                    self.execute("--check", *self.extra(format))
                    self.written("hf", expected())

    def test_what_stays_in_one_chunk(self):
        """Flat buffers, opaque tensors, and codes and scales."""
        (self.folder / "model.yaml").write_text("""
dtype: fp32
tensors: {w: [64, 64], v: [64, 64], o: {opaque: 1000}}
layouts:
  hf: {params: same}
  flat: {params: {all: {flat: [w, v]}, o: {holds: o}}}
""")
        for target, counts in (
            ("layout: flat", {"all": 1, "o": 1}),
            ("layout: hf, quantize: {format: mxfp8, only: w}", {"o": 1, "v": 64, "w": 1, "w_scale": 1}),
        ):
            for folder in ("hf", "out"):
                shutil.rmtree(self.folder / folder, ignore_errors=True)
            self.compile(HF, f"{{{target}, storage: {{folder: out, format: dcp, chunk: 256}}}}")
            self.execute("--synthesize", "--source=hf")
            self.execute("--check")
            listing = self.listing("out")["tensors"]
            self.assertEqual({name: len(tensor["chunks"]) for name, tensor in listing.items()}, counts)

    def test_chunks_without_a_stated_size(self):
        """64 MiB, or more where the grid of all tensors would have more than 131,072 pieces."""
        for rows, grid_ in (
            (65536 * 1024, "axis chunk_0 1024 stride 128\n  axis chunk_1 128 stride 1\n"),
            (65536 * 2048, "axis chunk_0 1024 stride 64\n  axis chunk_1 64 stride 1\n"),
        ):
            self.write(
                "model.yaml",
                f"dtype: u8\ntensors: {{a: [{rows}, 1024], b: [1, {128 << 26}]}}\nlayouts: {{hf: {{params: same}}}}\n",
            )
            self.compile("{layout: hf, mesh: {}}", stored("dcp"))
            self.prints(grid_, "reshard-compile job.yaml --emit=layout")

    def test_reports_of_a_target_in_chunks(self):
        self.write(
            "model.yaml",
            "dtype: u8\ntensors: {a: [8, 4], b: [3]}\nlayouts: {hf: {params: same}, tp: {params: same, shard: {a: {1: "
            "tp}}}}\n",
        )
        self.compile("{layout: tp, mesh: {tp: 2}}", stored("dcp", more=", chunk: 4"))
        for chunk in (0, 7):
            text = self.call(f"reshard-inspect p.rplan --explain=a@{chunk}").stdout
            self.assertTrue(text.startswith(f"target stored chunk {chunk}: a u8 [1, 4], 4 B\n"), text)
            self.assertEqual(text.count("    the rank has them itself: a copy\n"), 2, text)
        self.fails("found rank '8', expected 0 to 7", "reshard-inspect p.rplan --explain=a@8")
        found = self.listing("p.rplan", "--param=*")
        self.assertEqual(
            [(one["at"], one["name"], one["from"]) for one in found if one["name"] == "a"],
            [(f"stored chunk {chunk}", "a", {"rank 0": 2, "rank 1": 2}) for chunk in range(8)],
        )
        self.assertEqual([sum(one["from"].values()) for one in found if one["name"] == "b"], [3])

    def test_chunks_out_of_order(self):
        """Layout IR with other strides: each mesh rank would have another chunk's bytes."""
        self.write("model.yaml", "dtype: u8\ntensors: {a: [4, 4]}\nlayouts: {hf: {params: same}}\n")
        self.compile(HF, stored("dcp", more=", chunk: 2"))
        text = self.call("reshard-compile job.yaml --emit=layout").stdout
        self.assertIn("axis chunk_0 4 stride 2\n  axis chunk_1 2 stride 1", text)
        self.write(
            "job.rir",
            text.replace(
                "chunk_0 4 stride 2\n  axis chunk_1 2 stride 1", "chunk_0 4 stride 1\n  axis chunk_1 2 stride 4"
            ),
        )
        self.call("reshard-compile job.rir -o p.rplan")
        self.execute("--synthesize", "--source=hf")
        self.stops("the chunks of tensor 'a' of target are not in row-major order", "--check", code=3)
        self.assertFalse((self.folder / "out").exists())

    def test_a_source_states_its_chunks(self):
        self.dcp()
        self.refused(
            "unexpected 'chunk': only a target of format dcp or megatron is written in chunks",
            stored("dcp", "dcp", "saved", ", chunk: 64"),
        )

    def test_tied_weights_are_stored_once(self):
        self.dcp()
        self.compile()  # the files have no model.head
        shutil.move(self.folder / "dcp", self.folder / "before")
        # They have no model.embed, which is declared first.
        Dcp(self.folder / "dcp").whole({key.replace("embed", "head"): array for key, array in values().items()}).write()
        self.moves()

    def test_a_tied_weight_that_is_no_longer_stored(self):
        """The plan was compiled for files with both names."""
        both = values() | {"model.head": values()["model.embed"]}
        for folder, tensors in (("dcp", both), ("later", values())):
            Dcp(self.folder / folder).whole(tensors).write()
        self.compile()
        self.execute("--source=later")
        self.written("hf", expected())

    def test_chunks_of_params_with_units(self):
        """Chunks may cut a unit, and the only unit of a param: that is a rule for ranks."""
        self.write(
            "model.yaml",
            MODEL.replace("  saved:\n", "  saved:\n    axes: [tp]\n    shard: {'*.up': {0: {axis: tp, unit: 7}}}\n"),
        )
        self.dcp()
        self.moves()

    def quantized(self, cut: str = "", leave_out: str = "") -> None:
        """Matrices as mxfp4 in `codes`, of safetensors, and in `dcp`, beside a tensor in three chunks."""
        self.write(
            "model.yaml",
            "dtype: fp32\nindex: {layer: 2}\ntensors: {'w.{layer}': [64, 96], b: [6, 5]}\n"
            "layouts: {hf: {params: same}, tp: {params: same, axes: [tp], shard: {'w.*': {0: tp}, b: {0: tp}}}}\n",
        )
        rng = np.random.default_rng(5)
        for folder in ("codes", "dcp"):
            shutil.rmtree(self.folder / folder, ignore_errors=True)
        save_file(
            {
                name: rng.standard_normal(shape).astype(np.float32)
                for name, shape in (("w.0", (64, 96)), ("w.1", (64, 96)), ("b", (6, 5)))
            },
            self.folder / "plain.safetensors",
        )
        self.compile(
            "{layout: hf, storage: plain.safetensors}",
            "{layout: hf, storage: codes, quantize: {format: mxfp4, only: w.*}}",
        )
        self.execute("--target=codes")
        checkpoint = Dcp(self.folder / "dcp")
        for name, array in load_file(self.folder / "codes/model.safetensors").items():
            ends = [0, 2, 3, 6] if name == "b" else [0, 32, 64] if name == cut else [0, len(array)]
            for i, (begin, end) in enumerate(itertools.pairwise(ends)):
                if name != leave_out:
                    checkpoint.chunk(name, array.shape, (begin, 0), array[begin:end], f"__{i}_0.distcp")
        checkpoint.write()

    def test_quantized(self):
        self.quantized()
        for i, target in enumerate(
            (
                "{layout: hf, storage: X}",
                "{layout: hf, storage: X, quantize: {format: mxfp4, only: w.*}}",
                "{layout: hf, storage: X, quantize: {format: mxfp8, only: w.*}, dtype: bf16, convert: rne}",
                "{layout: tp, mesh: {tp: 2}, storage: X, quantize: {format: mxfp4, only: w.*}}",
                "{layout: hf, storage: {folder: X, format: torch-save}, quantize: {format: mxfp4, only: w.*}}",
            )
        ):
            found = []
            for source in ("codes", "dcp"):
                with self.subTest(target=target, source=source):
                    out = f"{source}-{i}"
                    self.compile(
                        f"{{layout: hf, storage: {source}, quantize: {{format: mxfp4, only: w.*}}}}",
                        target.replace("X", out),
                    )
                    self.call("reshard-inspect p.rplan --verify")
                    self.execute("--check")
                    found.append({path.name: path.read_bytes() for path in sorted((self.folder / out).iterdir())})
            self.assertEqual(found[0], found[1])

    def test_errors_of_quantized_sources(self):
        source, hf = "{layout: hf, storage: dcp, quantize: {format: mxfp4, only: w.*}}", HF
        self.quantized(cut="w.1_scale")
        self.refused(
            "dcp': tensor 'w.1_scale' is stored in 2 chunks, but param 'w.{layer}' is quantized as mxfp4: "
            "the chunks of its codes and scales may cut a "
            "block, expected one chunk of each; 'reshard-convert SOURCE NEW --to=safetensors' joins them",
            source,
        )
        for name in ("w.0", "w.1_scale"):
            self.quantized(leave_out=name)
            self.refused(f"dcp' (DCP) has no tensor '{name}'", source)
        self.quantized()
        self.compile(source.replace("mxfp4", "mxfp8"), hf)
        self.stops("dcp': tensor 'w.0' is u8, expected fp8_e4m3")
        self.assertFalse((self.folder / "hf").exists())

    def test_opaque_tensors_are_not_cut(self):
        self.write(
            "model.yaml",
            "dtype: u8\ntensors:\n  state: {opaque: 6}\nlayouts:\n  saved: {params: {state: {holds: state}}}\n "
            " hf: {params: same}\n",
        )
        checkpoint = Dcp(self.folder / "dcp")
        for i in (0, 3):
            checkpoint.chunk("state", (6,), (i,), np.arange(i, i + 3, dtype=np.uint8), f"__{i}_0.distcp")
        checkpoint.write()
        self.refused("is stored in 2 chunks, but param 'state' holds an opaque tensor, expected one chunk")

    def test_flat_buffers_in_several_chunks(self):
        """Chunks cut tensors of a bucket anywhere, also padding, a transposed tensor and packs; those
        of two buckets differ."""
        (self.folder / "model.yaml").write_text("""
dtype: fp32
index: {layer: 2}
tensors:
  "w.{layer}": [3, 4, 5]
  "t.{layer}": [5, 7]
  "b.{layer}": [3]
  "c.{layer}": [4, 2]
  "d.{layer}": [4, 6]
  "e.{layer}": [6, 3]
  "f.{layer}": [2, 3]
layouts:
  saved:
    params:
      "bucket.{layer}":
        flat:
          of:
            - "b.{layer}"
            - {of: "t.{layer}", permute: [1, 0]}
            - "w.{layer}"
            - {concat: {of: ["c.{layer}", "d.{layer}"], dim: 1}}
            - {interleave: {of: ["e.{layer}", "f.{layer}"], groups: 2}}
          align: 16
  hf: {params: same}
""")
        tensors = {
            f"{name}.{layer}": np.arange(
                1000 * layer + base, 1000 * layer + base + np.prod(shape), dtype=np.float32
            ).reshape(shape)
            for layer in range(2)
            for name, shape, base in (
                ("w", (3, 4, 5), 1),
                ("t", (5, 7), 100),
                ("b", (3,), 200),
                ("c", (4, 2), 300),
                ("d", (4, 6), 400),
                ("e", (6, 3), 500),
                ("f", (2, 3), 600),
            )
        }
        self.save_checkpoint("hf0", tensors)
        self.compile("{layout: hf, storage: hf0}", "{layout: saved, storage: whole}")
        self.execute()
        buckets = load_file(self.folder / "whole/model.safetensors")
        size = len(buckets["bucket.0"])
        random = np.random.default_rng(3)
        for chunks in (2, 3, 7, 40):
            checkpoint = Dcp(self.folder / f"dcp-{chunks}")
            for name, values in buckets.items():
                cuts = [0, *sorted(random.choice(np.arange(1, size), chunks - 1, replace=False).tolist()), size]
                for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
                    checkpoint.chunk(name, (size,), (begin,), values[begin:end], f"__{i}_0.distcp")
            checkpoint.write()
            for layout, wanted in (("hf", tensors), ("saved", buckets)):
                with self.subTest(chunks=chunks, layout=layout):
                    out = f"{layout}-{chunks}"
                    self.compile(f"{{layout: saved, storage: dcp-{chunks}}}", f"{{layout: {layout}, storage: {out}}}")
                    self.call("reshard-inspect p.rplan --verify")
                    self.execute("--check")
                    self.written(out, wanted)

    def test_too_many_cuts_of_flat_buffers(self):
        names = [f"w{i}" for i in range(700)]
        tensors = "".join(f"  {name}: [1, 2]\n" for name in names)
        self.write(
            "model.yaml",
            f"dtype: u8\ntensors:\n  long: [3000]\n{tensors}layouts:\n  hf: {{params: same}}\n"
            f"  saved: {{params: {{long: {{holds: long}}, state: {{flat: [{', '.join(names)}]}}}}}}\n",
        )
        checkpoint = Dcp(self.folder / "dcp")
        for name, size, chunks in (("long", 3000, 3000), ("state", 1400, 2)):
            for i in range(chunks):
                length = size // chunks
                checkpoint.chunk(name, (size,), (i * length,), np.zeros(length, dtype=np.uint8), "__0_0.distcp")
        checkpoint.write()
        self.refused(
            "has tensors in up to 3000 chunks, and param 'state' is a flat buffer of 700 parts: expected flat buffers "
            "in several chunks with parts times "
            "chunks of at most 2097152 together; 'reshard-convert SOURCE NEW --to=safetensors' joins chunks"
        )

    def test_one_file_of_safetensors(self):
        save_file(values(), self.folder / "one.safetensors")
        self.moves("{layout: saved, storage: one.safetensors}")

    def test_outputs_do_not_replace_the_source(self):
        path = self.torch_save()
        before = path.read_bytes()
        self.compile("{layout: saved, storage: saved.pt}", HF)
        for command in (
            "reshard-compile job.yaml -o saved.pt",
            "reshard-compile job.yaml -o p2.rplan --report=saved.pt",
            "reshard-exec p.rplan --report=saved.pt",
            "reshard-exec p.rplan --trace=saved.pt",
        ):
            with self.subTest(command=command):
                self.fails("'saved.pt' would overwrite a file of the source's storage", command)
                self.assertEqual(path.read_bytes(), before)

    def test_from_a_plan_elsewhere(self):
        """--from reads the source again: the chunks are not in the plan's job."""
        self.dcp()
        self.compile()
        self.call("reshard-compile --from=p.rplan -o again.rplan")
        self.same_file("again.rplan", "p.rplan")
        shutil.move(self.folder / "dcp", self.folder / "moved")
        self.fails("No such file or directory", "reshard-compile --from=p.rplan -o other.rplan")
        self.assertFalse((self.folder / "other.rplan").exists())
        self.save_checkpoint("dcp", values())
        self.fails("has the format 'safetensors', expected 'dcp'", "reshard-compile --from=p.rplan -o other.rplan")

    def test_a_folder_with_the_files_of_two_formats(self):
        """`format` chooses; without it the files beside those of torch.distributed.checkpoint decide."""
        self.dcp()
        other = {name: -array for name, array in expected().items()}
        self.save_checkpoint("dcp", other)
        for format, layout, wanted in (("dcp", "saved", expected()), ("safetensors", "hf", other)):
            with self.subTest(format=format):
                self.compile(stored(format, "dcp", layout), f"{{layout: hf, storage: out-{format}}}")
                self.execute("--check")
                self.written(f"out-{format}", wanted)
        shards = {"model.a": np.full((2, 3), 7, np.float32)}
        (self.folder / "dcp/model.safetensors").unlink()
        safetensors(self.folder / "dcp/shard-00001-model-00001-of-00001.safetensors", shards, {"model.a": [0, 0]})
        listed = self.refused("model.a", stored("dcp-safetensors", "dcp", "saved"))
        self.assertNotIn("has the format", listed)
        self.save_checkpoint("dcp", other)
        self.refused(
            "model.safetensors': its header has no 'DCP_SHARDING_INFO', but other files of the folder have",
            stored("dcp-safetensors", "dcp", "saved"),
        )
        self.write("dcp/metadata.json", "{}")
        self.fails("'sharded_backend' is missing", "reshard-inspect dcp")
        self.compile(stored("dcp", "dcp", "saved"), "{layout: hf, storage: again}")
        self.execute("--check")
        self.write("dcp/metadata.json", MEGATRON)  # which has a common.pt
        self.refused("has the format 'megatron', expected 'dcp'", stored("dcp", "dcp", "saved"))

    def test_reports_show_the_format(self):
        self.dcp()
        self.compile()
        self.prints("source     dcp chunks 0..7: 8 chunks", "reshard-inspect p.rplan")
        shutil.copy(self.folder / "p.rplan", self.folder / "before.rplan")
        self.compile(SAVED, stored("dcp", "hf"))
        text = self.call("reshard-diff before.rplan p.rplan", code=1).stdout
        self.assertRegex(text, "format of target +safetensors +dcp")

    def test_memory(self):
        """Less memory than the checkpoint has, which is read in parts."""
        self.dcp()
        self.moves(SAVED, "--memory=256MiB")

    def test_a_checkpoint_with_other_chunks(self):
        self.dcp()
        self.compile()
        Dcp(self.folder / "other").whole(values()).write()
        self.stops("that of the plan; compile the plan with this source", "--source=other")
        self.assertFalse((self.folder / "hf").exists())
        text = "has the format 'torch-save', but the plan was compiled for 'dcp'"
        self.stops(text, f"--source={self.torch_save()}")

    def test_objects_and_extra_tensors(self):
        self.with_objects("dcp", {"step": pickle.dumps(3)})
        self.compile()
        self.assertIn(
            "checkpoint 'dcp' has objects that the target cannot hold: 'step' (format 'safetensors' holds tensors "
            "only); --allow=extra leaves them out, --leave=GLOB those with such names",
            self.execute(code=2).replace(f"{self.folder}/", ""),
        )
        self.execute("--allow=extra")
        self.written("hf", expected())

    def with_objects(self, folder: str, objects: dict[str, bytes], common: bytes = b"") -> None:
        checkpoint = Dcp(self.folder / folder).whole(values())
        for name, data in objects.items():
            checkpoint.object(name, data)
        checkpoint.write()
        if common:
            (self.folder / folder / "common.pt").write_bytes(common)
            self.write(f"{folder}/metadata.json", MEGATRON)

    def objects(self, folder: str) -> dict[str, bytes]:
        found = self.listing(folder)["objects"]
        return {
            name: (self.folder / folder / at["file"]).read_bytes()[at["begin"] : at["begin"] + at["bytes"]]
            for name, at in found.items()
        }

    def carry(self, source: str, target: str, format: str, *options: str, code: int = 0) -> str:
        self.compile(f"{{layout: saved, storage: {source}}}", stored(format, target))
        return self.execute("--check", "--report=report.json", *options, code=code)

    def not_carried(self, error: str, *arguments: str) -> None:
        self.assertIn(error, self.carry(*arguments, code=2))

    def test_objects_are_carried(self):
        step, state = pickle.dumps(3), bytes(range(256)) * 30
        objects = {"step": step, "model.up._extra_state/shard_0.1_4.2": state, "empty": b""}
        self.with_objects("dcp", objects)
        self.carry("dcp", "a", "dcp", "--max-shard-size=300")
        self.assertEqual(self.objects("a"), objects)
        self.assertEqual(self.json("report.json")["objects"], sorted(objects))
        renames = ("--rename-objects=model.=", "--rename-objects=model.up.=down.")
        self.carry("dcp", "b", "dcp", "--leave=st?p", "--leave=em*", *renames)
        self.assertEqual(self.objects("b"), {"down._extra_state/shard_0.1_4.2": state})
        report = self.json("report.json")
        self.assertEqual(
            (report["omitted"], report["omitted_objects"], report["objects"]),
            ([], ["empty", "step"], ["down._extra_state/shard_0.1_4.2"]),
        )
        self.not_carried(
            "cannot hold: 'empty', 'step' (Megatron-Core's objects have names such as 'key/shard_0_1'); --allow=extra",
            "dcp",
            "c",
            "megatron",
        )
        self.assertFalse((self.folder / "c").exists())
        self.carry("dcp", "c", "megatron", "--allow=extra")
        found = self.objects("c")
        self.assertEqual(found.pop("model.up._extra_state/shard_0.1_4.2"), state)
        self.assertEqual(list(found), ["common.pt"])

    def test_the_common_state_of_megatron_is_carried(self):
        common = archive({"iteration": 7}, [])
        state = {"a/shard_0_2": b"1", "a/shard_1_2": b"22"}
        self.with_objects("megatron", state, common)
        for format in ("megatron", "dcp"):
            self.carry("megatron", f"to-{format}", format)
            self.assertEqual(self.objects(f"to-{format}"), state | {"common.pt": common})
        self.assertEqual((self.folder / "to-megatron/common.pt").read_bytes(), common)
        self.with_objects("newer", {"common_state/shard_0_1": common})
        self.write("newer/metadata.json", MEGATRON)
        self.carry("newer", "to-newer", "megatron")
        self.assertEqual(self.objects("to-newer"), {"common_state/shard_0_1": common})

    def test_errors_of_objects(self):
        self.with_objects("dcp", {"a.step": b"1", "b.step": b"2"})
        for option, error in (
            ("--leave=c*", "'c*' in --leave matches no object of"),
            ("--rename-objects=a.=b.", "two objects get the name 'b.step'"),
            (
                "--rename-objects=a.step=scale",
                "object 'a.step' gets the name 'scale', which a tensor of the target has; --rename-objects",
            ),
            ("--rename-objects=a", "invalid value 'a', expected OLD=NEW"),
        ):
            with self.subTest(option=option):
                self.not_carried(error, "dcp", "out", "dcp", option)
                self.assertFalse((self.folder / "out").exists())
        self.stops("--leave applies to files, expected no --synthesize", "--synthesize", "--leave=*")
        self.torch_save("x.pt", epoch=3)
        self.compile("{layout: saved, storage: x.pt}", stored("dcp"))
        self.stops("cannot hold: 'epoch' (it is a part of a larger pickle and has no bytes of its own)")
        self.execute("--leave=epoch", "--check")

    def test_errors_of_the_job(self):
        path = self.dcp(leave_out="model.layers.1.up")
        self.refused("'dcp' (DCP) has no tensor 'model.layers.1.up', did you mean")
        self.dcp()
        self.write("model.yaml", MODEL.replace("up: [7, 5]", "up: [7, 6]"))
        self.refused("tensor 'model.layers.0.up' has shape [7, 5], expected [7, 6]")
        self.write("model.yaml", MODEL.replace("dtype: fp32", "dtype: bf16"))
        self.refused("is fp32, expected bf16; 'dtype: stored' in the source uses the dtypes of its files")
        self.compile(
            "{layout: saved, storage: dcp, dtype: stored}", "{layout: hf, storage: hf, dtype: bf16, convert: rne}"
        )
        self.write("model.yaml", MODEL)
        for source, error in (
            (stored("torch-save", "dcp", "saved"), "dcp' has the format 'dcp', expected 'torch-save'"),
            (stored("pt", "dcp", "saved"), "expected safetensors, dcp-safetensors, dcp, megatron or torch-save"),
            (stored("dcp", "none", "saved"), "none': No such file or directory"),
            (
                "{layout: tp, storage: {folder: dcp, format: dcp}, mesh: {tp: 2}}",
                "'format: dcp' and 'mesh' cannot be combined",
            ),
        ):
            with self.subTest(source=source):
                self.refused(error, source)
        (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[:-200])
        self.refused("truncated")

    def test_two_processes(self):
        """Each opens the source, and the files that the first has created."""
        self.dcp(step=b"3")
        for format in ("dcp", "dcp-safetensors", "torch-save"):
            with self.subTest(format=format):
                self.compile(SAVED, stored(format, "x") + "\nworld: 2")
                out = f"new-{format}"
                run = f"reshard-exec p.rplan --transport=mpi --target={out} --check --allow=extra"
                mpirun(2, run, cwd=self.folder)
                self.assertEqual(self.objects(out), {"step": b"3"} if format == "dcp" else {})
                self.compile(f"{{layout: hf, storage: {out}}}", HF)
                self.execute(f"--target={out}-hf", "--allow=extra")
                self.written(f"{out}-hf", expected())

    def test_synthesized(self):
        self.dcp()
        self.compile()
        self.execute("--synthesize", "--check")
        text = "a source of format 'dcp' cannot be written, expected 'safetensors'"
        self.stops(text, "--synthesize", "--source=new", code=3)
        self.assertFalse((self.folder / "new").exists())


if __name__ == "__main__":
    unittest.main()

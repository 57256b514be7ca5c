# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as endpoints, compared with the official safetensors package: reads a sharded Hugging Face folder that
the package wrote; the package reads a checkpoint and rank files (mixed dtypes, scalars, empty tensors) that
reshard-exec wrote, with the right alignment, names, shapes and values. RESHARD_BIN: the folder of the commands;
needs numpy and safetensors."""

import json
import os
import shutil
import struct
import unittest
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from commands import FolderTest, run

# Elements of 1 to 8 bytes, with an odd number of small ones: in this order, the large elements would be unaligned.
MODEL = """
version: 1
model:
  tensors:
    flags: {shape: [2, 5], dtype: bool, shard: {0: tp}}
    table: {shape: [7], dtype: i64}
    half: {shape: [2, 4], dtype: fp16, shard: {0: tp}}
    scale: {shape: [], dtype: fp32}
    none: {shape: [0, 3], dtype: fp32}
    wide: {shape: [4, 3], dtype: fp64, shard: {0: tp}}
    bytes: {shape: [3], dtype: u8}
"""


def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {
        "flags": rng.integers(0, 2, (2, 5)).astype(np.bool_),
        "table": rng.integers(-(2**62), 2**62, 7),
        "half": rng.standard_normal((2, 4)).astype(np.float16),
        "scale": np.array(0.5, np.float32),
        "none": np.zeros((0, 3), np.float32),
        "wide": rng.standard_normal((4, 3)),
        "bytes": rng.integers(0, 256, 3).astype(np.uint8),
    }


HF = "source: {storage: hf}\ntarget: {mesh: {tp: 1}}\n"


class Checkpoints(FolderTest):
    def run_job(self, endpoints: str, source: str, target: str, *more: str, expect: int = 0) -> str:
        self.write("job.yaml", MODEL + endpoints)
        self.call("reshard-compile job.yaml -o p.rplan")
        self.call("reshard-inspect p.rplan --verify")
        run = f"reshard-exec p.rplan --source={source} --target={target} --check"
        return self.call(run, *more, code=expect).stderr

    def refuses(self, error: str, endpoints: str, source: str, target: str, *more: str) -> None:
        self.assertIn(error, self.run_job(endpoints, source, target, *more, expect=2))

    def equal(self, path: Path, expected: dict[str, np.ndarray]) -> None:
        found = load_file(path)
        self.assertEqual(set(found), set(expected))
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value)
            self.assertEqual((found[name].dtype, found[name].shape), (value.dtype, value.shape), name)
        length = struct.unpack("<Q", path.read_bytes()[:8])[0]
        self.assertEqual(length % 8, 0)
        header = json.loads(path.read_bytes()[8 : 8 + length])
        self.assertEqual(header.pop("__metadata__", None), None if path.name.startswith("rank-") else {"format": "pt"})
        for name, entry in header.items():
            self.assertEqual(entry["data_offsets"][0] % expected[name].dtype.itemsize, 0, name)

    def sharded(self, folder: Path) -> None:
        """Writes the tensors as Hugging Face writes large models: two files and an index."""
        folder.mkdir()
        tensors, index = values(), {}
        for number, names in enumerate((("flags", "wide", "scale"), ("table", "half", "none", "bytes")), 1):
            file = f"model-{number:05d}-of-00002.safetensors"
            save_file({name: tensors[name] for name in names}, folder / file)
            index.update(dict.fromkeys(names, file))
        text = json.dumps({"metadata": {"total_size": 1}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(text)

    def test_round_trip(self) -> None:
        self.sharded(self.folder / "hf")
        tensors = values()
        self.run_job(HF, "hf", "one")
        self.equal(self.folder / "one/rank-00000.safetensors", tensors)
        self.run_job("source: {mesh: {tp: 1}}\ntarget: {storage: out}\n", "one", "again")
        self.assertEqual([path.name for path in (self.folder / "again").iterdir()], ["model.safetensors"])
        self.equal(self.folder / "again/model.safetensors", tensors)

    def test_sharded_over_ranks(self) -> None:
        self.sharded(self.folder / "hf")
        tensors = values()
        target = self.folder / "ranks"
        self.run_job("source: {storage: hf}\ntarget: {mesh: {tp: 2}, ranks: 3..4}\n", "hf", "ranks")
        names = ["rank-00003.safetensors", "rank-00004.safetensors"]
        self.assertEqual(sorted(path.name for path in target.iterdir()), names)
        for t in range(2):
            expected = tensors | {name: np.split(tensors[name], 2)[t] for name in ("flags", "half", "wide")}
            self.equal(target / names[t], expected)

    def test_other_names(self) -> None:
        """--rename gives the tensors of a checkpoint the names of the job; it applies to nothing else."""
        self.save_checkpoint("named", {f"module.{name}": value for name, value in values().items()})
        endpoints = HF.replace("hf", "named")
        self.refuses("has no tensor 'flags'", endpoints, "named", "one")
        self.run_job(endpoints, "named", "one", "--rename=module.=")
        self.equal(self.folder / "one/rank-00000.safetensors", values())
        ranks = "source: {mesh: {tp: 1}}\ntarget: {mesh: {tp: 1}}\n"
        for job, source, option, error in (
            (endpoints, "named", "--rename=modul=", "has no tensor 'flags'"),
            (endpoints, "named", "--rename=x=", "--rename=x=: 'x' begins no name of the tensors of checkpoint '"),
            (
                ranks,
                "one",
                "--rename=a=b",
                "--rename applies to the tensors of a checkpoint, but the source has a file",
            ),
        ):
            self.refuses(error, job, source, "none", option)
            self.assertFalse((self.folder / "none").exists())
        self.fails(
            "--rename applies to the tensors of a checkpoint, expected a source with 'storage' and no 'mesh'",
            "reshard-compile job.yaml -o q.rplan --rename=a=b",
        )
        self.assertFalse((self.folder / "q.rplan").exists())
        self.fails(
            "--rename applies to files, expected no --synthesize", "reshard-exec p.rplan --synthesize --rename=a=b"
        )

    def test_tensors_that_the_plan_does_not_use(self) -> None:
        """Tensors of a checkpoint that a job does not use (buffers, towers, heads) are refused, or ignored with
        --allow=extra."""
        self.sharded(self.folder / "hf")
        endpoints = "source: {storage: hf, ignore: [table, scale]}\ntarget: {mesh: {tp: 1}, ignore: [table, scale]}\n"
        unused = "has tensor 'scale', which the plan does not use (and 1 more); --allow=extra ignores such tensors"
        self.refuses(unused, endpoints, "hf", "one")
        self.run_job(endpoints, "hf", "one", "--allow=extra", "--report=r.json")
        self.equal(
            self.folder / "one/rank-00000.safetensors",
            {name: value for name, value in values().items() if name not in ("table", "scale")},
        )
        self.assertEqual(self.json("r.json")["omitted"], ["scale", "table"])
        # A missing tensor is still an error. --allow=extra applies to rank files too.
        rank = self.folder / "one/rank-00000.safetensors"
        save_file(load_file(rank) | {"rotary.inv_freq": np.ones(4, np.float32)}, rank)
        job = "source: {mesh: {tp: 1}, ignore: [table, scale]}\ntarget: {storage: out, ignore: [table, scale]}\n"
        self.refuses("'rotary.inv_freq'", job, "one", "again")
        self.run_job(job, "one", "again", "--allow=extra")
        self.refuses("has no tensor 'scale'", job.replace("[table, scale]", "table"), "one", "third", "--allow=extra")

    def test_folders_of_the_job(self) -> None:
        """`storage`, relative to the plan's folder, is the default for --source and --target, whatever the current
        folder is."""
        plans = self.folder / "plans"
        plans.mkdir()
        self.sharded(plans / "hf")
        (self.folder / "elsewhere").mkdir()

        def compiled(source: str, target: str, folder: Path = plans) -> Path:
            self.write("job.yaml", f"{MODEL}source: {source}\ntarget: {target}\n")
            self.call("reshard-compile job.yaml -o", folder / "p", "--allow=axis")
            return folder / "p"

        def execute(plan: Path, *flags: str, expect: int = 0) -> str:
            done = run("reshard-exec", plan, "--check", *flags, code=expect, cwd=self.folder / "elsewhere")
            self.assertEqual(list((self.folder / "elsewhere").iterdir()), [])
            return done.stderr

        plan = compiled("{storage: hf}", "{storage: out}")
        execute(plan)
        self.equal(plans / "out/model.safetensors", values())
        execute(plan, f"--target={self.folder / 'other'}")
        self.equal(self.folder / "other/model.safetensors", values())
        self.assertIn(f"'{plans / 'out'}' already exists", execute(plan, expect=2))
        self.assertIn(
            f"'{plans / 'none'}' does not exist", execute(compiled("{storage: none}", "{storage: out}"), expect=2)
        )
        execute(compiled("{storage: none}", "{storage: second}"), f"--source={plans / 'hf'}")
        self.equal(plans / "second/model.safetensors", values())
        execute(
            compiled(
                f"{{storage: {plans / 'hf'}}}", f"{{storage: {self.folder / 'third'}}}", self.folder / "elsewhere/.."
            ).rename(self.folder / "elsewhere/../q")
        )
        self.equal(self.folder / "third/model.safetensors", values())
        before = sorted(self.folder.rglob("*"))
        self.assertIn(
            "names no folder for its target, expected --target=DIR",
            execute(compiled("{storage: hf}", "{mesh: {}}"), expect=2),
        )
        self.assertIn(
            "names no folder for its source, expected --source=DIR",
            execute(compiled("{mesh: {}}", "{storage: out}"), expect=2),
        )
        self.assertIn(
            "several targets, expected --target=DIR",
            execute(compiled("{storage: hf}", "[{storage: a}, {storage: b}]"), expect=2),
        )
        self.assertEqual(sorted(self.folder.rglob("*")), before)

    def test_copies_the_files_of_a_model(self) -> None:
        """--copy adds the small files of a folder to the weights; a file that cannot be copied is an error that leaves
        no output."""
        self.sharded(self.folder / "hf")
        beside = {
            "config.json": "{}",
            "generation_config.json": "{}",
            "tokenizer.json": "{}",
            "merges.txt": "a b",
            "modeling_x.py": "pass",
        }
        for name, text in beside.items():
            (self.folder / "blob").mkdir(exist_ok=True)
            self.write(f"blob/{name}", text)
            (self.folder / "hf" / name).symlink_to(self.folder / "blob" / name)  # as in a cache of the hub
        for name in (".gitattributes", "pytorch_model.bin", "training.pt"):
            self.write(f"hf/{name}", "x")
        (self.folder / "hf/figures").mkdir()
        endpoints, hf = "source: {storage: hf}\ntarget: [{storage: out}, {mesh: {tp: 2}}]\n", self.folder / "hf"
        self.run_job(endpoints, "hf", "new", f"--copy={hf}", "--max-shard-size=50", "--report=r.json")
        out = self.folder / "new/target.0"
        self.assertEqual(
            {path.name: path.read_text() for path in out.iterdir() if "safetensors" not in path.name}, beside
        )
        self.assertFalse(any(path.is_symlink() for path in out.iterdir()))
        self.assertEqual(self.json("r.json")["copied"], sorted(beside))
        index = json.loads((out / "model.safetensors.index.json").read_text())
        self.assertEqual(index["metadata"]["total_size"], sum(value.nbytes for value in values().values()))
        for file in set(index["weight_map"].values()):
            self.equal(out / file, {name: values()[name] for name, of in index["weight_map"].items() if of == file})
        self.assertEqual(
            {path.name for path in (self.folder / "new/target.1").iterdir()},
            {"rank-00000.safetensors", "rank-00001.safetensors"},
        )

        for option, message in (
            (f"--copy={hf}", "--copy adds files to a written checkpoint, expected a target"),
            ("--max-shard-size=1GiB", "--max-shard-size applies to files of a written checkpoint, expected"),
        ):
            self.refuses(message, HF, "hf", "again", option)
        for spoil, message in (
            (lambda at: (at / "config.json").unlink(), "has no 'config.json'"),
            (lambda at: (at / "vocab.json").symlink_to("nowhere"), "vocab.json' is a broken link"),
            (lambda at: os.mkfifo(at / "pipe"), "pipe' is not a regular file"),
            (lambda at: os.truncate(at / "merges.txt", 300 << 20), "expected small files other than weights"),
            (lambda at: (at / "a\nb").write_text(""), "has a name with characters other than printable ASCII"),
            (lambda at: shutil.rmtree(at), "No such file or directory"),
        ):
            at = self.folder / "copy"
            shutil.copytree(self.folder / "blob", at)
            spoil(at)
            self.refuses(message, endpoints, "hf", "again", f"--copy={at}")
            shutil.rmtree(at, ignore_errors=True)
            self.assertEqual([path for path in self.folder.iterdir() if path.name.startswith("again")], [])

    def test_dtypes_as_stored(self) -> None:
        """`dtype: stored`: each param of a storage source has the dtype in the files' headers instead of the model's;
        contradictory dtypes are refused."""
        job = (
            "version: 1\nmodel:\n  dtype: fp16\n  index: {layer: 2}\n"
            "  tensors: {'l.{layer}.w': [4, 2], 'l.{layer}.b': {shape: [4], dtype: fp32}, l.9.b: {shape: [4], dtype: "
            "fp32}, n: [3]}\n"
            "  layouts:\n    hf: {params: same}\n    wide: {params: same, shard: {'*.w': {0: tp}}}\n"
        )
        source = {f"l.{layer}.w": np.arange(8, dtype=np.float32).reshape(4, 2) for layer in range(2)}
        source |= {f"l.{layer}.b": np.arange(4, dtype=np.float16) for layer in range(2)}
        source |= {"l.9.b": np.arange(4, dtype=np.float32), "n": np.arange(3, dtype=np.float16)}
        self.save_checkpoint("hf", source)
        (self.folder / "ranks").mkdir()
        save_file(
            {name: value[:2] if name.endswith("w") else value for name, value in source.items()},
            self.folder / "ranks/rank-00000.safetensors",
        )
        save_file(
            {name: value[2:] if name.endswith("w") else value for name, value in source.items()},
            self.folder / "ranks/rank-00001.safetensors",
        )
        for endpoint in (
            "{layout: hf, storage: hf, dtype: stored}",
            "{layout: wide, storage: ranks, mesh: {tp: 2}, dtype: stored}",
        ):
            self.write(
                "job.yaml",
                f"{job}source: {endpoint}\ntarget: {{layout: hf, storage: out, convert: rne, dtype: fp32}}\n",
            )
            plan, out = self.folder / "p.rplan", self.folder / "out"
            self.call("reshard-compile job.yaml -o", plan)
            run("reshard-exec", plan, "--check")
            found = load_file(out / "model.safetensors")
            self.assertEqual(sorted(found), sorted(source))
            for name, value in source.items():
                np.testing.assert_array_equal(found[name], value.astype(np.float32))
            (out / "model.safetensors").unlink()
            out.rmdir()

        def refused(*sets: str) -> str:
            done = self.call("reshard-compile job.yaml -o none", *(f"--set={each}" for each in sets), code=2)
            self.assertFalse((self.folder / "none").exists())
            return done.stderr

        self.assertIn(
            "error: 'dtype: stored': 'no' contains no safetensors file with tensors", refused("source.storage=no")
        )
        self.assertIn(
            "'dtype: stored' reads dtypes from file headers and needs a source with 'storage', found it in the target",
            refused("target.dtype=stored"),
        )
        source["l.1.b"] = source["l.1.b"].astype(np.float32)
        self.save_checkpoint("hf", source)
        self.assertIn(
            "error: param 'l.{layer}.b' is stored as fp16 ('l.0.b') and as fp32 ('l.1.b'), expected one dtype",
            refused("source={layout: hf, storage: hf, dtype: stored}"),
        )

    def test_described_from_anywhere(self) -> None:
        """The described model finds the checkpoint's config.json from any folder, whatever the names of the folders."""
        self.sharded(self.folder / 'h "f"')
        self.write('h "f"/config.json', '{"rows": 7}')
        elsewhere = self.folder / "elsewhere"
        elsewhere.mkdir()
        described = self.call("reshard-compile", '--describe=h "f"').stdout
        (elsewhere / "printed.yaml").write_text(described)
        run("reshard-compile", '--describe=../h "f"', "-o", "written.yaml", cwd=elsewhere)
        for name in ("printed", "written"):
            job = elsewhere / f"{name}-job.yaml"
            job.write_text(
                f"version: 1\nmodel: {{extend: {name}.yaml, let: {{rows: $rows}}, tensors: {{table: {{shape: [rows], "
                f"dtype: i64}}}}}}\n"
                "source: {storage: files}\ntarget: {mesh: {}}\n"
            )
            run("reshard-compile", job, "-o", self.folder / "plan", cwd="/")

    def test_outputs_do_not_overwrite_stored_files(self) -> None:
        """An output that would overwrite a file in a `storage` folder of the job is refused."""
        self.sharded(self.folder / "hf")
        (self.folder / "link").symlink_to(self.folder / "hf/config.json")
        self.write("hf/config.json", "{}")
        self.write("job.yaml", f"{MODEL}source: {{storage: hf}}\ntarget: {{mesh: {{}}}}\n")
        before = {path: path.read_bytes() for path in (self.folder / "hf").iterdir()}
        first = next(path for path in sorted(before) if path.suffix == ".safetensors")
        for flags in (["-o", first], ["-o", "link"], ["-o", "p", "--report", first]):
            self.fails(
                "would overwrite a file of the source's storage 'hf', expected another file",
                "reshard-compile job.yaml --allow=axis",
                *flags,
            )
            self.assertEqual({path: path.read_bytes() for path in (self.folder / "hf").iterdir()}, before)
        self.assertFalse((self.folder / "p").exists())
        self.call("reshard-compile job.yaml --allow=axis -o hf/new.rplan")

    def test_description_does_not_overwrite_the_checkpoint(self) -> None:
        """--describe with -o that names a file of the checkpoint is refused."""
        self.sharded(self.folder / "hf")
        self.write("hf/config.json", "{}")
        before = {path: path.read_bytes() for path in (self.folder / "hf").iterdir()}
        for path in before:
            self.fails(f"option '-o': '{path}' would overwrite the input", "reshard-compile --describe=hf -o", path)
        self.assertEqual({path: path.read_bytes() for path in (self.folder / "hf").iterdir()}, before)

    def test_what_is_not_read_is_said(self) -> None:
        """A file that the index does not list gets a note; the names of a model cannot have braces."""
        self.sharded(self.folder / "hf")
        save_file({"w{0}": np.ones(2, np.float32)}, self.folder / "hf/more.safetensors")
        note = "note: 'hf': not read, because 'model.safetensors.index.json' does not list them: 'more.safetensors'\n"
        self.assertEqual(self.run_job(HF, "hf", "one"), note)
        self.assertEqual(self.call("reshard-inspect hf").stderr, note)
        self.prints(
            "# left out, because braces in the names of a model are index variables, which --rename=OLD=NEW "
            'removes: "w{0}"\n',
            "reshard-compile --describe=hf/more.safetensors",
        )

    def test_a_wrong_index_moves_nothing(self) -> None:
        self.sharded(self.folder / "hf")
        index = self.folder / "hf/model.safetensors.index.json"
        good = json.loads(index.read_text())
        for change, message in (
            (
                {"wide": "../hf/model-00001-of-00002.safetensors"},
                "tensor 'wide' has an invalid file name, expected a file in the same folder",
            ),
            (
                {"wide": "model-00002-of-00002.safetensors"},
                "has 4 tensors, but the index lists 5 there; the file lacks 'wide'",
            ),
            ({"extra": "model-00003-of-00002.safetensors"}, "No such file"),
        ):
            index.write_text(json.dumps({"weight_map": {**good["weight_map"], **change}}))
            self.refuses(message, HF, "hf", "one")
            self.assertEqual({path.name for path in self.folder.iterdir()}, {"hf", "job.yaml", "p.rplan"})


if __name__ == "__main__":
    unittest.main()

"""Checkpoints as endpoints, beside the official safetensors package: a sharded Hugging Face folder it wrote is read; a
checkpoint and rank files of mixed dtypes, scalars and empty tensors that we wrote are read by it, aligned, with the
right names, shapes and values. RESHARD_BIN: the folder of the commands; needs numpy and safetensors."""

import json
import os
import shutil
import struct
import subprocess
import tempfile
import unittest
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

BIN = Path(os.environ["RESHARD_BIN"]).resolve()

# Elements of 1 to 8 bytes, an odd number of the small ones: written in this order, the large would be unaligned.
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


class Checkpoints(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = Path(folder.name)

    def run_job(self, endpoints: str, source: Path, target: Path, expect: int = 0, more: tuple[str, ...] = ()) -> str:
        (self.work / "job.yaml").write_text(MODEL + endpoints)
        plan = self.work / "p.rplan"
        for command in (["reshard-compile", self.work / "job.yaml", "-o", plan], ["reshard-inspect", plan, "--verify"]):
            subprocess.run([BIN / command[0], *command[1:]], check=True, stdout=subprocess.DEVNULL)
        command = [BIN / "reshard-exec", plan, f"--source={source}", f"--target={target}", "--check", *more]
        result = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(result.returncode, expect, result.stdout + result.stderr)
        return result.stderr

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
        """As Hugging Face writes large models: two files and an index."""
        folder.mkdir()
        tensors, index = values(), {}
        for number, names in enumerate((("flags", "wide", "scale"), ("table", "half", "none", "bytes")), 1):
            file = f"model-{number:05d}-of-00002.safetensors"
            save_file({name: tensors[name] for name in names}, folder / file)
            index.update(dict.fromkeys(names, file))
        text = json.dumps({"metadata": {"total_size": 1}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(text)

    def test_there_and_back(self) -> None:
        self.sharded(self.work / "hf")
        tensors = values()
        self.run_job("source: {storage: hf}\ntarget: {mesh: {tp: 1}}\n", self.work / "hf", self.work / "one")
        self.equal(self.work / "one/rank-00000.safetensors", tensors)
        self.run_job("source: {mesh: {tp: 1}}\ntarget: {storage: out}\n", self.work / "one", self.work / "again")
        self.assertEqual([path.name for path in (self.work / "again").iterdir()], ["model.safetensors"])
        self.equal(self.work / "again/model.safetensors", tensors)

    def test_cut_over_ranks(self) -> None:
        self.sharded(self.work / "hf")
        tensors = values()
        target = self.work / "ranks"
        self.run_job("source: {storage: hf}\ntarget: {mesh: {tp: 2}, ranks: 3..4}\n", self.work / "hf", target)
        names = ["rank-00003.safetensors", "rank-00004.safetensors"]
        self.assertEqual(sorted(path.name for path in target.iterdir()), names)
        for t in range(2):
            expected = tensors | {name: np.split(tensors[name], 2)[t] for name in ("flags", "half", "wide")}
            self.equal(target / names[t], expected)

    def test_what_the_model_does_not_know(self) -> None:
        """Checkpoints carry buffers, towers and heads that a job has no use for: refused, unless it is said that they may be left out."""
        self.sharded(self.work / "hf")
        endpoints = "source: {storage: hf, ignore: [table, scale]}\ntarget: {mesh: {tp: 1}, ignore: [table, scale]}\n"
        error = self.run_job(endpoints, self.work / "hf", self.work / "one", expect=2)
        self.assertIn("has tensor 'scale', which the plan does not know (and 1 more); --allow=extra leaves such tensors out", error)
        report = self.work / "r.json"
        self.run_job(endpoints, self.work / "hf", self.work / "one", more=("--allow=extra", f"--report={report}"))
        self.equal(self.work / "one/rank-00000.safetensors", {name: value for name, value in values().items() if name not in ("table", "scale")})
        self.assertEqual(json.loads(report.read_text())["omitted"], ["scale", "table"])
        # A tensor that is missing stays an error, and rank files may have too much as well.
        rank = self.work / "one/rank-00000.safetensors"
        save_file(load_file(rank) | {"rotary.inv_freq": np.ones(4, np.float32)}, rank)
        job = "source: {mesh: {tp: 1}, ignore: [table, scale]}\ntarget: {storage: out, ignore: [table, scale]}\n"
        self.assertIn("'rotary.inv_freq'", self.run_job(job, self.work / "one", self.work / "again", expect=2))
        self.run_job(job, self.work / "one", self.work / "again", more=("--allow=extra",))
        self.assertIn("lacks tensor 'scale'", self.run_job(job.replace("[table, scale]", "table"), self.work / "one", self.work / "third", expect=2, more=("--allow=extra",)))

    def test_folders_of_the_job(self) -> None:
        """`storage` is where files are read and written unless the command line says otherwise: relative to the plan's folder, from wherever it is run."""
        plans = self.work / "plans"
        plans.mkdir()
        self.sharded(plans / "hf")
        (self.work / "elsewhere").mkdir()

        def compiled(source: str, target: str, folder: Path = plans) -> Path:
            (self.work / "job.yaml").write_text(f"{MODEL}source: {source}\ntarget: {target}\n")
            subprocess.run([BIN / "reshard-compile", self.work / "job.yaml", "-o", folder / "p", "--allow=axis"], check=True, capture_output=True)
            return folder / "p"

        def execute(plan: Path, *flags: str, expect: int = 0) -> str:
            done = subprocess.run([BIN / "reshard-exec", plan, "--check", *flags], cwd=self.work / "elsewhere", capture_output=True, text=True)
            self.assertEqual(done.returncode, expect, done.stdout + done.stderr)
            self.assertEqual(list((self.work / "elsewhere").iterdir()), [])
            return done.stderr

        plan = compiled("{storage: hf}", "{storage: out}")
        execute(plan)
        self.equal(plans / "out/model.safetensors", values())
        execute(plan, f"--target={self.work / 'other'}")
        self.equal(self.work / "other/model.safetensors", values())
        self.assertIn(f"'{plans / 'out'}' exists already", execute(plan, expect=2))
        self.assertIn(f"'{plans / 'none'}' is no folder", execute(compiled("{storage: none}", "{storage: out}"), expect=2))
        execute(compiled("{storage: none}", "{storage: second}"), f"--source={plans / 'hf'}")
        self.equal(plans / "second/model.safetensors", values())
        execute(compiled(f"{{storage: {plans / 'hf'}}}", f"{{storage: {self.work / 'third'}}}", self.work / "elsewhere/..").rename(self.work / "elsewhere/../q"))
        self.equal(self.work / "third/model.safetensors", values())
        before = sorted(self.work.rglob("*"))
        self.assertIn("names no folder of its target, expected --target=DIR", execute(compiled("{storage: hf}", "{mesh: {}}"), expect=2))
        self.assertIn("names no folder of its source, expected --source=DIR", execute(compiled("{mesh: {}}", "{storage: out}"), expect=2))
        self.assertIn("several targets, expected --target=DIR", execute(compiled("{storage: hf}", "[{storage: a}, {storage: b}]"), expect=2))
        self.assertEqual(sorted(self.work.rglob("*")), before)

    def test_what_makes_it_a_model(self) -> None:
        """--copy puts the small files of a folder beside the weights; what cannot be copied leaves nothing behind."""
        self.sharded(self.work / "hf")
        beside = {"config.json": "{}", "generation_config.json": "{}", "tokenizer.json": "{}", "merges.txt": "a b", "modeling_x.py": "pass"}
        for name, text in beside.items():
            (self.work / "blob").mkdir(exist_ok=True)
            (self.work / "blob" / name).write_text(text)
            (self.work / "hf" / name).symlink_to(self.work / "blob" / name)  # as in a cache of the hub
        for name in (".gitattributes", "pytorch_model.bin", "training.pt"):
            (self.work / "hf" / name).write_text("x")
        (self.work / "hf/figures").mkdir()
        endpoints, hf, report = "source: {storage: hf}\ntarget: [{storage: out}, {mesh: {tp: 2}}]\n", self.work / "hf", self.work / "r.json"
        self.run_job(endpoints, hf, self.work / "new", more=(f"--copy={hf}", "--max-shard-size=50", f"--report={report}"))
        out = self.work / "new/target.0"
        self.assertEqual({path.name: path.read_text() for path in out.iterdir() if "safetensors" not in path.name}, beside)
        self.assertFalse(any(path.is_symlink() for path in out.iterdir()))
        self.assertEqual(json.loads(report.read_text())["copied"], sorted(beside))
        index = json.loads((out / "model.safetensors.index.json").read_text())
        self.assertEqual(index["metadata"]["total_size"], sum(value.nbytes for value in values().values()))
        for file in set(index["weight_map"].values()):
            self.equal(out / file, {name: values()[name] for name, of in index["weight_map"].items() if of == file})
        self.assertEqual({path.name for path in (self.work / "new/target.1").iterdir()}, {"rank-00000.safetensors", "rank-00001.safetensors"})

        one = "source: {storage: hf}\ntarget: {mesh: {tp: 1}}\n"
        self.assertIn("--copy puts files beside a written checkpoint, expected a target", self.run_job(one, hf, self.work / "again", expect=2, more=(f"--copy={hf}",)))
        self.assertIn("--max-shard-size is about files of a written checkpoint, expected", self.run_job(one, hf, self.work / "again", expect=2, more=("--max-shard-size=1GiB",)))
        for spoil, message in (
            (lambda at: (at / "config.json").unlink(), "lacks 'config.json'"),
            (lambda at: (at / "vocab.json").symlink_to("nowhere"), "vocab.json' leads to no file"),
            (lambda at: os.mkfifo(at / "pipe"), "pipe' is no regular file"),
            (lambda at: os.truncate(at / "merges.txt", 300 << 20), "expected small files beside the weights"),
            (lambda at: (at / "a\nb").write_text(""), "has a name that is not of printable ASCII characters"),
            (lambda at: shutil.rmtree(at), "No such file or directory"),
        ):
            at = self.work / "copy"
            shutil.copytree(self.work / "blob", at)
            spoil(at)
            self.assertIn(message, self.run_job(endpoints, hf, self.work / "again", expect=2, more=(f"--copy={at}",)))
            shutil.rmtree(at, ignore_errors=True)
            self.assertEqual([path for path in self.work.iterdir() if path.name.startswith("again")], [])

    def test_dtypes_as_stored(self) -> None:
        """`dtype: stored`: each param of a source of files has the dtype that the headers say, whatever the model says; wrong ones are refused."""
        job = ("version: 1\nmodel:\n  dtype: fp16\n  index: {layer: 2}\n"
               "  tensors: {'l.{layer}.w': [4, 2], 'l.{layer}.b': {shape: [4], dtype: fp32}, l.9.b: {shape: [4], dtype: fp32}, n: [3]}\n"
               "  layouts:\n    hf: {params: same}\n    wide: {params: same, shard: {'*.w': {0: tp}}}\n")
        source = {f"l.{layer}.w": np.arange(8, dtype=np.float32).reshape(4, 2) for layer in range(2)}
        source |= {f"l.{layer}.b": np.arange(4, dtype=np.float16) for layer in range(2)}
        source |= {"l.9.b": np.arange(4, dtype=np.float32), "n": np.arange(3, dtype=np.float16)}
        (self.work / "hf").mkdir()
        save_file(source, self.work / "hf/model.safetensors")
        (self.work / "ranks").mkdir()
        save_file({name: value[:2] if name.endswith("w") else value for name, value in source.items()}, self.work / "ranks/rank-00000.safetensors")
        save_file({name: value[2:] if name.endswith("w") else value for name, value in source.items()}, self.work / "ranks/rank-00001.safetensors")
        for endpoint in ("{layout: hf, storage: hf, dtype: stored}", "{layout: wide, storage: ranks, mesh: {tp: 2}, dtype: stored}"):
            (self.work / "job.yaml").write_text(f"{job}source: {endpoint}\ntarget: {{layout: hf, storage: out, convert: rne, dtype: fp32}}\n")
            plan, out = self.work / "p.rplan", self.work / "out"
            subprocess.run([BIN / "reshard-compile", self.work / "job.yaml", "-o", plan], check=True, stdout=subprocess.DEVNULL)
            subprocess.run([BIN / "reshard-exec", plan, "--check"], check=True, stdout=subprocess.DEVNULL)
            found = load_file(out / "model.safetensors")
            self.assertEqual(sorted(found), sorted(source))
            for name, value in source.items():
                np.testing.assert_array_equal(found[name], value.astype(np.float32))
            (out / "model.safetensors").unlink()
            out.rmdir()

        def refused(*sets: str) -> str:
            command = [BIN / "reshard-compile", self.work / "job.yaml", "-o", self.work / "none", *(f"--set={each}" for each in sets)]
            done = subprocess.run(command, capture_output=True, text=True)
            self.assertEqual((done.returncode, (self.work / "none").exists()), (2, False), done.stderr)
            return done.stderr

        self.assertIn("error: 'dtype: stored': '" + str(self.work / "no") + "' has no files of tensors", refused("source.storage=no"))
        self.assertIn("'dtype: stored' reads dtypes from file headers and needs a source with 'storage', found it in the target", refused("target.dtype=stored"))
        source["l.1.b"] = source["l.1.b"].astype(np.float32)
        save_file(source, self.work / "hf/model.safetensors")
        self.assertIn("error: param 'l.{layer}.b' is stored as fp16 ('l.0.b') and as fp32 ('l.1.b'), expected one dtype",
                      refused("source={layout: hf, storage: hf, dtype: stored}"))

    def test_described_from_anywhere(self) -> None:
        """The described model finds the checkpoint's config.json wherever it is put, and whatever the names of the folders."""
        self.sharded(self.work / 'h "f"')
        (self.work / 'h "f"/config.json').write_text('{"rows": 7}')
        elsewhere = self.work / "elsewhere"
        elsewhere.mkdir()
        described = subprocess.run([BIN / "reshard-compile", '--describe=h "f"'], cwd=self.work, capture_output=True, text=True, check=True).stdout
        (elsewhere / "printed.yaml").write_text(described)
        subprocess.run([BIN / "reshard-compile", '--describe=../h "f"', "-o", "written.yaml"], cwd=elsewhere, check=True)
        for name in ("printed", "written"):
            job = elsewhere / f"{name}-job.yaml"
            job.write_text(f"version: 1\nmodel: {{extend: {name}.yaml, let: {{rows: $rows}}, tensors: {{table: {{shape: [rows], dtype: i64}}}}}}\n"
                           "source: {storage: files}\ntarget: {mesh: {}}\n")
            done = subprocess.run([BIN / "reshard-compile", job, "-o", self.work / "plan"], cwd="/", capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_plans_replace_no_stored_files(self) -> None:
        """A plan or a report in place of a file of a folder that the job stores weights in is refused."""
        self.sharded(self.work / "hf")
        (self.work / "link").symlink_to(self.work / "hf/config.json")
        (self.work / "hf/config.json").write_text("{}")
        (self.work / "job.yaml").write_text(f"{MODEL}source: {{storage: hf}}\ntarget: {{mesh: {{}}}}\n")
        before = {path: path.read_bytes() for path in (self.work / "hf").iterdir()}
        first = next(path for path in sorted(before) if path.suffix == ".safetensors")
        for flags in (["-o", first], ["-o", "link"], ["-o", "p", "--report", first]):
            done = subprocess.run([BIN / "reshard-compile", "job.yaml", "--allow=axis", *flags], cwd=self.work, capture_output=True, text=True)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn("is a file of the source's storage 'hf', expected another file", done.stderr)
            self.assertEqual({path: path.read_bytes() for path in (self.work / "hf").iterdir()}, before)
        self.assertFalse((self.work / "p").exists())
        subprocess.run([BIN / "reshard-compile", "job.yaml", "--allow=axis", "-o", "hf/new.rplan"], cwd=self.work, check=True, capture_output=True)

    def test_described_onto_itself(self) -> None:
        """-o that names a file of the checkpoint would replace it."""
        self.sharded(self.work / "hf")
        (self.work / "hf/config.json").write_text("{}")
        before = {path: path.read_bytes() for path in (self.work / "hf").iterdir()}
        for path in before:
            done = subprocess.run([BIN / "reshard-compile", f"--describe={self.work / 'hf'}", "-o", path], capture_output=True, text=True)
            self.assertEqual(done.returncode, 2)
            self.assertIn(f"option '-o': '{path}' is the input", done.stderr)
        self.assertEqual({path: path.read_bytes() for path in (self.work / "hf").iterdir()}, before)

    def test_a_wrong_index_moves_nothing(self) -> None:
        self.sharded(self.work / "hf")
        index = self.work / "hf/model.safetensors.index.json"
        good = json.loads(index.read_text())
        for change, message in (
            ({"wide": "../hf/model-00001-of-00002.safetensors"}, "tensor 'wide' is in no file of this folder"),
            ({"wide": "model-00002-of-00002.safetensors"}, "has 3 tensors, the index says 2"),
            ({"extra": "model-00003-of-00002.safetensors"}, "No such file"),
        ):
            index.write_text(json.dumps({"weight_map": {**good["weight_map"], **change}}))
            endpoints = "source: {storage: hf}\ntarget: {mesh: {tp: 1}}\n"
            error = self.run_job(endpoints, self.work / "hf", self.work / "one", expect=2)
            self.assertIn(message, error)
            self.assertEqual({path.name for path in self.work.iterdir()}, {"hf", "job.yaml", "p.rplan"})


if __name__ == "__main__":
    unittest.main()

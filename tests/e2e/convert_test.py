# SPDX-License-Identifier: Apache-2.0
"""reshard-convert, from the command line: every pair of formats, names, dtypes, a model file, several processes; errors
that leave nothing behind."""

import contextlib
import fcntl
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import unittest
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("lib", "mpi")]
from commands import BIN, run  # noqa: E402
from conversions import ConvertTest  # noqa: E402
from mpi_test import MPIRUN  # noqa: E402
from torch_formats import Dcp, safetensors  # noqa: E402

KILLS = 20 if os.environ.get("RESHARD_FULL") == "1" else 3
FORMATS = ("safetensors", "dcp", "dcp-safetensors", "torch-save")


def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    tensors = {f"model.layers.{layer}.up.weight": rng.standard_normal((6, 4)).astype(np.float32) for layer in range(3)}
    return tensors | {"model.embed.weight": rng.standard_normal((8, 4)).astype(np.float32), "lm_head.weight": rng.integers(0, 99, (3, 2))}


class Convert(ConvertTest):
    def setUp(self) -> None:
        super().setUp()
        (self.folder / "hf").mkdir()
        save_file(values(), self.folder / "hf/model.safetensors")

    def test_every_pair_of_formats(self):
        for first in FORMATS:
            self.convert("hf", f"a-{first}", f"--to={first}")
            for second in FORMATS:
                with self.subTest(first=first, second=second):
                    self.convert(f"a-{first}", f"b-{first}-{second}", f"--to={second}")
                    self.convert(f"b-{first}-{second}", f"c-{first}-{second}")
                    self.check(f"c-{first}-{second}", values())

    def test_torch_dist(self):
        self.convert("hf", "megatron", "--to=torch_dist")
        self.assertIn("has objects that the target cannot hold: 'common.pt'", self.convert("megatron", "out", code=2).stderr)
        self.convert("megatron", "out", "--allow=extra")
        self.check("out", values())

    def test_names_and_dtype(self):
        text = self.convert("hf", "out", "--rename=model.=", "--rename=lm_head.=head.", "--dtype=fp16").stdout
        self.assertIn("hf: safetensors, 5 tensors, 0 objects\nmodel: none; the tensors keep their names, renamed\n", text)
        self.assertTrue(text.endswith("source: 5 tensors, 110 elements\ntarget: 5 tensors, 110 elements; 256 bytes, of which 0 are padding, were compared with the source and are right\n"), text)
        wanted = {name.removeprefix("model.").replace("lm_head", "head"): array.astype(np.float16) if array.dtype == np.float32 else array
                  for name, array in values().items()}
        self.check("out", wanted)
        text = self.convert("out", "back", "--rename==model.", "--only=*layers*").stdout
        self.assertIn("source: 5 tensors, 110 elements, with those that are left out\ntarget: 3 tensors, 72 elements; ", text)
        self.check("back", {f"model.{name}": array for name, array in wanted.items() if "layers" in name})

    def test_a_model_file(self):
        (self.folder / "model.yaml").write_text("""
dtype: fp32
index: {layer: 3}
tensors:
  model.layers.{layer}.up.weight: [6, 4]
  model.embed.weight: [8, 4]
  lm_head.weight: {shape: [3, 2], dtype: i64}
layouts:
  hf: {params: same}
  stacked: {params: {ups: {holds: "model.layers.{layer}.up.weight", stack: layer}, embed: {holds: model.embed.weight}, head: {holds: lm_head.weight}}}
""")
        self.convert("hf", "out", "--model=model.yaml", "--source-layout=hf", "--target-layout=stacked", "--memory=256MiB")
        tensors = values()
        self.check("out", {"ups": np.stack([tensors[f"model.layers.{layer}.up.weight"] for layer in range(3)]), "embed": tensors["model.embed.weight"],
                           "head": tensors["lm_head.weight"]})

    def test_objects(self):
        checkpoint = Dcp(self.folder / "dcp")
        for name, array in values().items():
            checkpoint.chunk(name, array.shape, (0, 0), array)
        checkpoint.object("step", pickle.dumps(1))
        checkpoint.write()
        error = self.convert("dcp", "out", code=2).stderr
        self.assertIn("has objects that the target cannot hold: 'step' (format 'safetensors' holds tensors only); --allow=extra leaves them out", error)
        self.assertFalse((self.folder / "out").exists())
        self.convert("dcp", "out", "--allow=extra")
        self.check("out", values())
        checkpoint.object("model.rng", pickle.dumps(2))
        checkpoint.write()
        self.convert("dcp", "again", "--to=dcp", "--rename=model.=", "--leave=step")
        text = run("reshard-inspect", self.folder / "again").stdout
        self.assertIn("1 object\n", text)
        self.assertIn("  object rng  ", text)

    def test_several_files(self):
        for format in ("safetensors", "dcp", "dcp-safetensors"):
            self.convert("hf", format, f"--to={format}", "--max-shard-size=200", "--no-sync", "--memory=256MiB")
            self.assertGreater(len([*(self.folder / format).glob("*.safetensors"), *(self.folder / format).glob("*.distcp")]), 2, format)
            self.convert(format, f"{format}-back")
            self.check(f"{format}-back", values())

    def test_chunks(self):
        text = self.convert("hf", "chunks", "--to=dcp", "--chunk=40").stdout
        self.assertIn("\ntarget: 5 tensors, 110 elements; ", text)
        sizes = [chunk["bytes"] for tensor in json.loads(run("reshard-inspect", self.folder / "chunks", "--format=json").stdout)["tensors"].values() for chunk in tensor["chunks"]]
        self.assertGreater(len(sizes), len(values()))
        self.assertLessEqual(max(sizes), 40)
        self.convert("chunks", "out")
        self.check("out", values())

    def test_nobody_reads_the_text(self):
        """As in `reshard-convert … | head -1`."""
        reader, pipe = os.pipe()
        line = threading.Thread(target=lambda: (os.read(reader, 1), os.close(reader)))
        line.start()
        self.assertEqual(self.convert("hf", "out", "--to=dcp", stdout=pipe).stderr, "")
        line.join()
        os.close(pipe)
        self.convert("out", "back")
        self.check("back", values())

    def test_reports(self):
        self.convert("hf", "out", "--report=r.json")
        self.assertEqual(json.loads((self.folder / "r.json").read_text())["checked_bytes"], sum(array.nbytes for array in values().values()))
        self.convert("hf", "again", "--report=/dev/null")
        self.assertIn("--report=/dev/full: No space left on device; 'third' is complete", self.convert("hf", "third", "--report=/dev/full", code=2).stderr)
        self.check("third", values())

    def test_shards_of_which_one_may_be_lost(self):
        self.convert("hf", "shards", "--to=dcp-safetensors")
        self.assertIn("\nshards: 1 files; the format does not state how many there were", self.convert("shards", "out").stdout)
        safetensors(self.folder / "shards/shard-00003-model-00001-of-00001.safetensors", {"more": np.ones(2, np.float32)}, {"more": [0]})
        self.assertIn("\nshards: 2 files, none with the number 2; the format", self.convert("shards", "more").stdout)

    def test_resume(self):
        """A second conversion has the same plan, as the journal of a killed one demands."""
        self.assertIn("expected no --no-sync", self.convert("hf", "out", "--resume", "--no-sync", code=2).stderr)
        self.convert("hf", "out", "--resume")
        job = self.convert("hf", "again", "--plan").stdout.replace("again", "out")
        (self.folder / "job.yaml").write_text(job)
        for name in ("one", "two"):
            (self.folder / name).mkdir()
            run("reshard-compile", self.folder / "job.yaml", "-o", self.folder / name / "plan")
        self.assertEqual((self.folder / "one/plan").read_bytes(), (self.folder / "two/plan").read_bytes())
        self.check("out", values())
        text = self.convert("hf", "new", "--resume").stdout
        self.assertIn("there was no unfinished target", text)

    def killed(self, *arguments: str) -> int:
        """Kills a conversion to `out` and its executor as soon as the journal has another record. Returns the number of records, 0 if it has ended before."""
        def records() -> int:
            with contextlib.suppress(FileNotFoundError):  # the folder has just got another name
                return sum(path.read_bytes().count(b"\n") - 1 for path in self.folder.glob("out.partial-*/.reshard-journal-0"))
            return 0

        before = records()
        process = subprocess.Popen([sys.executable, "-c", "from reshard.commands import convert; convert()", *arguments], cwd=self.folder,
                                   env=self.environment | {"TMPDIR": str(self.folder)}, stdout=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + 60
        try:
            while process.poll() is None and records() <= before:
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.001)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait(30)
        self.assertIn(code, (0, -signal.SIGKILL))
        for folder in self.folder.glob("out.partial-*"):  # until the executor has ended too, which may still write to the device
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            finally:
                os.close(lock)
        return records() if code else 0

    def test_killed(self):
        """The next conversion continues, with the bytes of one that was not killed."""
        rng = np.random.default_rng(5)
        (self.folder / "big").mkdir()
        save_file({f"w{i}": rng.integers(0, 256, 4 << 20, np.uint8) for i in range(32)}, self.folder / "big/model.safetensors")
        kills = 0
        for _ in range(100):
            if self.killed("big", "out", "--to=dcp", "--chunk=1MiB", "--resume"):
                kills += 1
                if kills == KILLS:
                    break
            else:  # a busy machine sees the record too late
                shutil.rmtree(self.folder / "out", ignore_errors=True)
        self.assertEqual(kills, KILLS)
        self.assertFalse((self.folder / "out").exists())
        self.assertRegex(self.convert("big", "out", "--to=dcp", "--chunk=1MiB", "--resume").stdout, r"resumed +[\d.]+ MiB were written by an earlier run")
        self.convert("big", "whole", "--to=dcp", "--chunk=1MiB")
        self.assertEqual(run("diff", "-r", self.folder / "whole", self.folder / "out").stdout, "")
        self.assertEqual(run("reshard-digest", self.folder / "big", self.folder / "out").stdout, "equal: 32 tensors\n")
        self.assertEqual(list(self.folder.glob("out.partial-*")), [])

    @unittest.skipUnless((BIN / "libreshard_ucx.so").exists(), "transport ucx was not built")
    def test_several_processes(self):
        """Under mpirun, and as processes of any parent that meet in a folder. One of them prints."""
        self.convert("hf", "alone", "--to=dcp")
        job = self.convert("hf", "out", "--to=dcp", "--plan", "--processes=2").stdout
        self.assertTrue(job.endswith("\nworld: 2\n"), job)
        size = sum(array.nbytes for array in values().values())
        command = [sys.executable, "-c", "from reshard.commands import convert; convert()", "hf"]
        options = ["--to=dcp", "--processes=2", "--timeout=60"]
        environment = self.environment | MPIRUN
        mpi = subprocess.run(["timeout", "-k10", "100", "mpirun", "-n", "2", *command, "mpi", "--transport=mpi", "--report=mpi.json", *options], cwd=self.folder, env=environment,
                             capture_output=True, text=True)
        self.assertEqual(mpi.returncode, 0, mpi.stdout + mpi.stderr)
        (self.folder / "meet").mkdir()
        ucx = [*command, "ucx", "--transport=ucx", f"--rendezvous=file://{self.folder}/meet", "--report=ucx.json", *options]
        met = [subprocess.Popen([*ucx, f"--rank={rank}"], cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
               for rank in range(2)]
        for process in met:
            self.addCleanup(process.kill)
        texts = [process.communicate(timeout=100)[0] for process in met]
        self.assertEqual([process.returncode for process in met], [0, 0], texts)
        for name, text in ("mpi", mpi.stdout), ("ucx", "".join(texts)):
            with self.subTest(name):
                self.assertEqual(text.count("hf: safetensors, 5 tensors, 0 objects"), 1, text)
                self.assertIn(f"; {size} bytes, of which 0 are padding, were compared with the source and are right", text)
                self.assertEqual(run("diff", "-r", self.folder / "alone", self.folder / name).stdout, "")
                self.assertEqual(json.loads((self.folder / f"{name}.json").read_text())["ranks"], 2)

    @unittest.skipUnless((BIN / "libreshard_ucx.so").exists(), "transport ucx was not built")
    def test_a_terminated_conversion_leaves_nothing(self):
        """SIGTERM also ends the executor, which here waits for another process."""
        for name in ("meet", "scratch"):
            (self.folder / name).mkdir()
        command = [sys.executable, "-c", "from reshard.commands import convert; convert()", "hf", "out", "--processes=2", "--rank=0", "--transport=ucx",
                   f"--rendezvous=file://{self.folder}/meet"]
        process = subprocess.Popen(command, cwd=self.folder, env=self.environment | {"TMPDIR": str(self.folder / "scratch")}, stderr=subprocess.DEVNULL)
        self.addCleanup(process.kill)
        deadline = time.monotonic() + 60
        while not any((self.folder / "meet").iterdir()):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        process.terminate()
        self.assertNotEqual(process.wait(30), 0)
        self.assertEqual(list((self.folder / "scratch").iterdir()), [])
        self.assertFalse((self.folder / "out").exists())

    def test_the_job(self):
        text = self.convert("hf", "out", "--to=dcp", "--plan").stdout
        self.assertFalse((self.folder / "out").exists())
        (self.folder / "job.yaml").write_text(text)
        for line in ("  index: {layer: 3}", "  model.embed.weight", '"format": "dcp"'):
            self.assertIn(line, text)

    def test_errors(self):
        (self.folder / "there").mkdir()
        for arguments, error in ((("none", "out"), "none"), (("hf", "there"), "'there' exists, expected a folder to create"),
                                 (("hf", "out", "--rename=x"), "invalid --rename='x': expected OLD=NEW"),
                                 (("hf", "out", "--rename=x.=y."), "x."),
                                 (("hf", "out", "--model=m.yaml"), "--model=m.yaml: no such file"),
                                 (("hf", "out", "--model=qwen3-0.7b"), "--model=qwen3-0.7b: expected the path of a YAML file, or one of deepseek-v3.2, deepseek-v3,"),
                                 (("hf", "out", "--config=c.json"), "--config=c.json: no such file"),
                                 (("hf", "out", "--source-layout=hf"), "unexpected --source-layout: --to=safetensors alone keeps the names"),
                                 (("hf", "out", "--optimizer"), "unexpected --optimizer: --to=safetensors alone keeps the names"),
                                 (("hf", "out", "--to=megatron"), "found no config.json in 'hf' or beside it"),
                                 (("hf", "out", "--to=hf", "--rename=a=b"), "unexpected --rename"),
                                 (("hf", "out", "--to=hf", "--mesh=tp=2"), "unexpected --mesh: it writes a file for each rank of --to=fsdp2, megatron, vllm, sglang"),
                                 (("hf", "out", "--to=vllm"), "--to=vllm needs --mesh"),
                                 (("hf", "out", "--to=megatron", "--mesh=tp=x", "--model=qwen3-8b"), "invalid --mesh 'tp=x'"),
                                 (("hf", "out", "--unquantized=*"), "unexpected --unquantized without --quantize"),
                                 (("hf", "out", "--rename=a=b", "--rename=a=c"), "--rename is given twice for 'a'"),
                                 (("hf", "out", "--to=torch-save", "--max-shard-size=1GB"), "unexpected --max-shard-size"),
                                 (("hf", "out", "--to=torch-save", "--chunk=1MiB"), "unexpected --chunk: a TARGET of --to=dcp"),
                                 (("hf", "out", "--chunk=1MiB"), "unexpected --chunk: a TARGET of --to=dcp"),
                                 (("hf", "out", "--only=*.none"), "'*.none' in 'only' matches no param of the target"),
                                 (("hf", "out", "--report=none/r.json"), "--report=none/r.json: found no folder 'none'"),
                                 (("hf", "out", "--report=hf/r.json"), "--report=hf/r.json is in 'hf', expected a file outside"),
                                 (("hf", "out", "--processes=0"), "invalid --processes=0: expected 1 or more"),
                                 (("hf", "out", "--processes=2"), "--processes=2 needs --transport=mpi or --transport=ucx"),
                                 (("hf", "out", "--processes=2", "--transport=ucx", "--rank=2"), "invalid --rank=2: expected 0 to 1"),
                                 (("hf", "out", "--insecure"), "unexpected --insecure without --processes=N of 2 or more"),
                                 (("hf", "out", "--rank=0"), "unexpected --rank without --processes=N of 2 or more"),
                                 (("hf", "out", "--to=pt"), "invalid choice: 'pt'")):
            with self.subTest(arguments=arguments):
                self.assertIn(error, self.convert(*arguments, code=2).stderr)
                self.assertFalse((self.folder / "out").exists())


if __name__ == "__main__":
    unittest.main()

# SPDX-License-Identifier: Apache-2.0
"""reshard-convert, from the command line: every pair of formats, names, dtypes, a model file, several processes; errors
that leave nothing behind."""

import contextlib
import fcntl
import json
import os
import pickle
import shlex
import shutil
import signal
import subprocess
import threading
import time
import unittest
from pathlib import Path

import numpy as np

from commands import BIN, CONVERT, MPIRUN, mpirun, run, words_of
from conversions import ConvertTest
from torch_formats import Dcp, safetensors

KILLS = 20 if os.environ.get("RESHARD_FULL") == "1" else 3
FORMATS = ("safetensors", "dcp", "dcp-safetensors", "torch-save")


def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    tensors = {f"model.layers.{layer}.up.weight": rng.standard_normal((6, 4)).astype(np.float32) for layer in range(3)}
    return tensors | {
        "model.embed.weight": rng.standard_normal((8, 4)).astype(np.float32),
        "lm_head.weight": rng.integers(0, 99, (3, 2)),
    }


class Convert(ConvertTest):
    def setUp(self) -> None:
        super().setUp()
        self.save_checkpoint("hf", values())

    def test_every_pair_of_formats(self):
        for first in FORMATS:
            self.convert(f"hf a-{first} --to={first}")
            for second in FORMATS:
                with self.subTest(first=first, second=second):
                    self.convert(f"a-{first} b-{first}-{second} --to={second}")
                    self.convert(f"b-{first}-{second} c-{first}-{second} --to=safetensors")
                    self.check(f"c-{first}-{second}", values())

    def test_torch_dist(self):
        self.convert("hf megatron --to=torch_dist")
        self.cannot_convert("has objects that the target cannot hold: 'common.pt'", "megatron out --to=safetensors")
        self.convert("megatron out --to=safetensors --allow=extra")
        self.check("out", values())

    def test_names_and_dtype(self):
        text = self.convert("hf out --rename=model.= --rename=lm_head.=head. --dtype=fp16").stdout
        self.assertIn(
            "hf: safetensors, 5 tensors, 0 objects\nmodel: none; the tensors keep their names, renamed\n", text
        )
        self.assertTrue(
            text.endswith(
                "source: 5 tensors, 110 elements\ntarget: 5 tensors, 110 elements; 256 bytes, of which 0 are padding, "
                "were compared with the source and are right\n"
            ),
            text,
        )
        wanted = {
            name.removeprefix("model.").replace("lm_head", "head"): array.astype(np.float16)
            if array.dtype == np.float32
            else array
            for name, array in values().items()
        }
        self.check("out", wanted)
        self.converts(
            "source: 5 tensors, 110 elements, with those that are left out\ntarget: 3 tensors, 72 elements; ",
            "out back --rename==model. --only=*layers*",
        )
        self.check("back", {f"model.{name}": array for name, array in wanted.items() if "layers" in name})

    def test_values_beyond_the_range(self):
        """A weight beyond the range of --dtype is an error that names --convert, which says what becomes of it."""
        self.save_checkpoint("wide", {"w": np.array([1, 70000], np.float32)})
        error = self.convert("wide out --to=safetensors --dtype=fp16", code=3).stderr
        self.assertIn("param 'w': found a value beyond the largest of the dtype, 65504", error)
        self.assertIn("; of reshard-convert, --convert=saturate or inf", error)
        for rule, value in (("saturate", 65504), ("inf", np.inf)):
            self.convert("wide", rule, "--to=safetensors", "--dtype=fp16", f"--convert={rule}")
            self.check(rule, {"w": np.array([1, value], np.float16)})

    def test_names_with_braces(self):
        """Braces in the names of a model are index variables: such a tensor is renamed or left out, and said."""
        weights = {name: np.full(2, i, np.float32) for i, name in enumerate(("v", "w{0}", "a.{x"))}
        self.save_checkpoint("braces", weights)
        error = self.convert("braces out --to=safetensors", code=2).stderr
        self.assertIn("'braces' has 2 tensors with braces in their names: a.{x, w{0}; ", error)
        self.assertIn("--rename=OLD=NEW gives others, --allow=extra leaves them out", error)
        text = self.convert("braces left --to=safetensors --allow=extra").stdout
        self.assertIn("left out   2 tensors of the source: a.{x, w{0}\n", text)
        self.assertIn("source: 1 tensors, 2 elements\ntarget: 1 tensors, 2 elements;", text)
        self.convert("braces out --to=safetensors", "--rename=w{0}=w0", "--rename=a.{=a.")
        self.check("out", {"v": weights["v"], "w0": weights["w{0}"], "a.x": weights["a.{x"]})

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
  stacked:
    params:
      ups: {holds: "model.layers.{layer}.up.weight", stack: layer}
      embed: {holds: model.embed.weight}
      head: {holds: lm_head.weight}
""")
        self.convert("hf out --model=model.yaml --source-layout=hf --target-layout=stacked --memory=256MiB")
        tensors = values()
        self.check(
            "out",
            {
                "ups": np.stack([tensors[f"model.layers.{layer}.up.weight"] for layer in range(3)]),
                "embed": tensors["model.embed.weight"],
                "head": tensors["lm_head.weight"],
            },
        )

    def test_objects(self):
        checkpoint = Dcp(self.folder / "dcp").whole(values())
        checkpoint.object("step", pickle.dumps(1))
        checkpoint.write()
        self.cannot_convert(
            "has objects that the target cannot hold: 'step' (format 'safetensors' holds tensors only); "
            "--allow=extra leaves them out",
            "dcp out --to=safetensors",
        )
        self.assertFalse((self.folder / "out").exists())
        self.convert("dcp out --to=safetensors --allow=extra")
        self.check("out", values())
        checkpoint.object("model.rng", pickle.dumps(2))
        checkpoint.write()
        self.convert("dcp again --to=dcp --rename=model.= --leave=step")
        text = self.call("reshard-inspect again").stdout
        self.assertIn("1 object\n", text)
        self.assertIn("  object rng  ", text)

    def trained(self) -> Path:
        """A checkpoint of dcp.save({"model": ..., "optimizer": ...}), with a config of an unknown architecture beside
        it."""
        checkpoint = Dcp(self.folder / "run/step-10")
        checkpoint.whole({f"model.{name}": array for name, array in values().items()})
        checkpoint.whole({f"optimizer.state.{name}.exp_avg": np.zeros_like(array) for name, array in values().items()})
        checkpoint.object("optimizer.param_groups", pickle.dumps([]))
        checkpoint.write()
        return self.folder / "run/step-10"

    def test_without_a_model(self):
        """Neither the prefix of dcp.save nor the optimizer's state is written unless --to asks for it; the error names
        the way that works."""
        self.trained()
        error = self.convert("run/step-10 out --allow=extra", code=2).stderr
        self.assertIn(
            "found no config.json in 'run/step-10' or beside it: --config=FILE or --model=NAME states the "
            "model of --to=hf, the default; --to=safetensors keeps the names, "
            "here model.lm_head.weight, model.model.embed.weight, model.model.layers.*.up.weight (3), "
            "optimizer.param_groups, optimizer.state.",
            error,
        )
        way = "--rename=model.= --ignore='optimizer*' "
        self.assertIn(f"without a model, --to=safetensors {way}--copy=DIR writes the weights", error)
        self.write("run/config.json", '{"architectures": ["OurOwnForCausalLM"]}')
        self.write("run/tokenizer.json", "{}")
        self.assertFalse((self.folder / "out").exists())
        error = self.convert("run/step-10 out", code=2).stderr
        self.assertIn("the library has no model for 'OurOwnForCausalLM'; known: ", error)
        way = f"--to=safetensors {way}--allow=extra --copy=DIR"
        self.assertIn(f"without a model, {way} writes the weights, with config.json and the tokenizer of DIR\n", error)
        for name, options in (("out", shlex.split(way)), ("again", shlex.split(way)[1:])):
            self.convert("run/step-10", name, *(option.replace("DIR", "run") for option in options))
            self.check(name, values())
            self.assertEqual(self.names(name), ["config.json", "model.safetensors", "tokenizer.json"])

    def test_leave_is_for_objects(self):
        self.trained()
        for options, error in (
            (
                "--leave=optimizer.state*",
                "--leave=optimizer.state* matches 5 tensors: optimizer.state.lm_head.weight.exp_avg, "
                "optimizer.state.model.embed",
            ),
            ("--leave=optimizer*", "it leaves out objects only, --ignore=optimizer* leaves out tensors"),
            ("--leave=none*", "--leave=none* matches no object of 'run/step-10', which has 1: optimizer.param_groups"),
        ):
            self.cannot_convert(error, f"run/step-10 out --to=safetensors {options}")
            self.assertFalse((self.folder / "out").exists())
        text = self.convert("run/step-10 out --to=dcp --leave=optimizer* --ignore=optimizer* --rename=model.=").stdout
        self.assertIn("  left out   1 object of the source: optimizer.param_groups\n", text)
        self.assertIn("left out: 3 tensors of the model, which TARGET does not get: optimizer.state.", text)
        self.convert("out back --to=safetensors")
        self.check("back", values())

    def test_wrappers(self):
        """Globs of --rename remove what torch.compile and others put inside names, also in one layer."""
        wrapped = {
            f"_orig_mod.{name.replace('.1.', '.1._checkpoint.inner.')}": array for name, array in values().items()
        }
        self.save_checkpoint("wrapped", wrapped)
        options = ("--rename=_orig_mod.=", "--rename=*._checkpoint.inner.*=*.*")
        for format in FORMATS:
            with self.subTest(format=format):
                self.convert(f"wrapped as-{format} --to={format}")
                self.convert(f"as-{format} {format}-out --to=safetensors", *options)
                self.check(f"{format}-out", values())
        job = self.convert("as-dcp planned --to=safetensors", *options, "--plan").stdout
        self.assertIn(
            "# reshard-compile and reshard-exec need --rename=_orig_mod.= "
            "'--rename=*._checkpoint.inner.*=*.*' with this job\n",
            job,
        )
        self.write("job.yaml", job)
        self.call("reshard-compile job.yaml -o p", *options)
        self.fails("has no tensor '", "reshard-exec p")
        self.call("reshard-exec p", *options)
        self.check("planned", values())
        for rule, error in (
            (
                "model.=a.",
                "'model.' begins no name of the tensors of 'wrapped': "
                "_orig_mod.lm_head.weight, _orig_mod.model.embed.weight,",
            ),
            ("*.none.*=*", "invalid --rename='*.none.*=*': expected as many '*' in NEW as in OLD"),
            ("*.none.*=*.*", "'*.none.*' matches no name"),
            ("_orig_mod.model.layers.0.=_orig_mod.model.layers.2.", "the name '_orig_mod.model.layers.2.up.weight'"),
            ("_orig_mod.lm_head.weight=", "leaves nothing of the name '_orig_mod.lm_head.weight'"),
        ):
            self.cannot_convert(error, "wrapped none --to=safetensors", f"--rename={rule}")

    def test_several_files(self):
        for format in ("safetensors", "dcp", "dcp-safetensors"):
            self.convert("hf", format, f"--to={format}", "--max-shard-size=200", "--no-sync", "--memory=256MiB")
            self.assertGreater(
                len([*(self.folder / format).glob("*.safetensors"), *(self.folder / format).glob("*.distcp")]),
                2,
                format,
            )
            self.convert(format, f"{format}-back", "--to=safetensors")
            self.check(f"{format}-back", values())

    def test_chunks(self):
        self.converts("\ntarget: 5 tensors, 110 elements; ", "hf chunks --to=dcp --chunk=40")
        sizes = [chunk["bytes"] for tensor in self.listing("chunks")["tensors"].values() for chunk in tensor["chunks"]]
        self.assertGreater(len(sizes), len(values()))
        self.assertLessEqual(max(sizes), 40)
        self.convert("chunks out --to=safetensors")
        self.check("out", values())

    def test_nobody_reads_the_text(self):
        """As in `reshard-convert … | head -1`."""
        reader, pipe = os.pipe()
        line = threading.Thread(target=lambda: (os.read(reader, 1), os.close(reader)))
        line.start()
        self.assertEqual(self.convert("hf out --to=dcp", stdout=pipe).stderr, "")
        line.join()
        os.close(pipe)
        self.convert("out back --to=safetensors")
        self.check("back", values())

    def test_reports(self):
        self.convert("hf out --to=safetensors --report=r.json")
        self.assertEqual(self.json("r.json")["checked_bytes"], sum(array.nbytes for array in values().values()))
        self.convert("hf again --to=safetensors --report=/dev/null")
        self.cannot_convert(
            "--report=/dev/full: No space left on device; 'third' is complete",
            "hf third --to=safetensors --report=/dev/full",
        )
        self.check("third", values())

    def test_shards_of_which_one_may_be_lost(self):
        self.convert("hf shards --to=dcp-safetensors")
        self.converts("\nshards: 1 files; the format does not state how many there were", "shards out --to=safetensors")
        safetensors(
            self.folder / "shards/shard-00003-model-00001-of-00001.safetensors",
            {"more": np.ones(2, np.float32)},
            {"more": [0]},
        )
        self.converts("\nshards: 2 files, none with the number 2; the format", "shards more --to=safetensors")

    def test_resume(self):
        """A second conversion has the same plan, as the journal of a killed one demands."""
        self.cannot_convert("expected no --no-sync", "hf out --to=safetensors --resume --no-sync")
        self.convert("hf out --to=safetensors --resume")
        job = self.convert("hf again --to=safetensors --plan").stdout.replace("again", "out")
        self.write("job.yaml", job)
        for name in ("one", "two"):
            (self.folder / name).mkdir()
            self.call(f"reshard-compile job.yaml -o {name}/plan")
        self.same_file("one/plan", "two/plan")
        self.check("out", values())
        self.converts("there was no unfinished target", "hf new --to=safetensors --resume")

    def killed(self, *arguments: str) -> int:
        """Kills a conversion to `out` and its executor as soon as the journal has another record. Returns the number of
        records, 0 if it has ended before."""

        def records() -> int:
            with contextlib.suppress(FileNotFoundError):  # the folder has just got another name
                return sum(
                    path.read_bytes().count(b"\n") - 1 for path in self.folder.glob("out.partial-*/.reshard-journal-0")
                )
            return 0

        before = records()
        process = self.start(
            *arguments, environment={"TMPDIR": str(self.folder)}, stdout=subprocess.DEVNULL, start_new_session=True
        )
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
        # Until the executor has ended too, which may still write to the device.
        for folder in self.folder.glob("out.partial-*"):
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            finally:
                os.close(lock)
        return records() if code else 0

    def test_killed(self):
        """The next conversion continues, with the bytes of one that was not killed."""
        rng = np.random.default_rng(5)
        self.save_checkpoint("big", {f"w{i}": rng.integers(0, 256, 4 << 20, np.uint8) for i in range(32)})
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
        self.assertRegex(
            self.convert("big out --to=dcp --chunk=1MiB --resume").stdout,
            r"resumed +[\d.]+ MiB were written by an earlier run",
        )
        self.convert("big whole --to=dcp --chunk=1MiB")
        self.assertEqual(self.call("diff -r whole out").stdout, "")
        self.assertEqual(self.call("reshard-digest big out").stdout, "equal: 32 tensors\n")
        self.assertEqual(list(self.folder.glob("out.partial-*")), [])

    @unittest.skipUnless((BIN / "libreshard_ucx.so").exists(), "transport ucx was not built")
    def test_several_processes(self):
        """Under mpirun, and as processes of any parent that meet in a folder. One of them prints."""
        self.convert("hf alone --to=dcp")
        job = self.convert("hf out --to=dcp --plan --processes=2").stdout
        self.assertTrue(job.endswith("\nworld: 2  # --processes=2\n"), job)
        size = sum(array.nbytes for array in values().values())
        options = "--to=dcp --processes=2 --timeout=60"
        mpi = mpirun(
            2,
            *CONVERT,
            *words_of(f"hf mpi {options} --transport=mpi --report=mpi.json"),
            cwd=self.folder,
            env=MPIRUN | self.environment,
        )
        (self.folder / "meet").mkdir()
        ucx = f"hf ucx {options} --transport=ucx --rendezvous=file://{self.folder}/meet --report=ucx.json"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        met = [self.start(f"{ucx} --rank={rank}", **pipes) for rank in range(2)]
        texts = [process.communicate(timeout=100)[0] for process in met]
        self.assertEqual([process.returncode for process in met], [0, 0], texts)
        for name, text in ("mpi", mpi.stdout), ("ucx", "".join(texts)):
            with self.subTest(name):
                self.assertEqual(text.count("hf: safetensors, 5 tensors, 0 objects"), 1, text)
                self.assertIn(
                    f"; {size} bytes, of which 0 are padding, were compared with the source and are right", text
                )
                self.assertEqual(self.call("diff -r alone", name).stdout, "")
                self.assertEqual(self.json(f"{name}.json")["ranks"], 2)

    def interrupted(self, number: int) -> tuple[int, bytes]:
        """Sends a signal to a conversion whose executor waits for another process. Returns the exit code and stderr."""
        for name in ("meet", "scratch"):
            (self.folder / name).mkdir()
        process = self.start(
            "hf out --to=dcp --processes=2 --rank=0 --transport=ucx",
            f"--rendezvous=file://{self.folder}/meet",
            environment={"TMPDIR": str(self.folder / "scratch")},
            stderr=subprocess.PIPE,
        )
        deadline = time.monotonic() + 60
        while not any((self.folder / "meet").iterdir()):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        process.send_signal(number)
        error = process.communicate(timeout=30)[1]
        self.assertEqual(self.names("scratch"), [])
        self.assertFalse((self.folder / "out").exists())
        return process.returncode, error

    @unittest.skipUnless((BIN / "libreshard_ucx.so").exists(), "transport ucx was not built")
    def test_a_terminated_conversion_leaves_nothing(self):
        """SIGTERM also ends the executor."""
        self.assertNotEqual(self.interrupted(signal.SIGTERM)[0], 0)

    @unittest.skipUnless((BIN / "libreshard_ucx.so").exists(), "transport ucx was not built")
    def test_ctrl_c(self):
        """No traceback, and nothing is left."""
        code, error = self.interrupted(signal.SIGINT)
        self.assertNotIn(b"Traceback", error)
        self.assertEqual(code, 130)

    def test_the_job(self):
        text = self.convert("hf out --to=dcp --plan").stdout
        self.assertFalse((self.folder / "out").exists())
        self.write("job.yaml", text)
        for line in ("  index: {layer: 3}", "  model.embed.weight", '"format": "dcp"'):
            self.assertIn(line, text)

    def test_errors(self):
        (self.folder / "there").mkdir()
        for arguments, error in (
            ("none out", "none"),
            ("hf there", "'there' exists, expected a folder to create"),
            ("hf out --rename=x", "invalid --rename='x': expected OLD=NEW"),
            (
                "hf out --rename=x.=y.",
                "'x.' begins no name of the tensors of 'hf': lm_head.weight, model.embed.weight, "
                "model.layers.*.up.weight (3)",
            ),
            ("hf out --model=m.yaml", "--model=m.yaml: no such file"),
            (
                "hf out --model=qwen3-0.7b",
                "--model=qwen3-0.7b: expected the path of a YAML file, or one of deepseek-v3.2, deepseek-v3,",
            ),
            ("hf out --config=c.json", "--config=c.json: no such file"),
            (
                "hf out --to=safetensors --source-layout=hf",
                "unexpected --source-layout: --to=safetensors alone keeps the names",
            ),
            ("hf out --to=safetensors --optimizer", "unexpected --optimizer: --to=safetensors alone keeps the names"),
            ("hf out --to=megatron", "found no config.json in 'hf' or beside it"),
            ("hf out --to=hf --rename=model.=b.", "found no config.json in 'hf' or beside it"),
            (
                "hf out",
                "states the model of --to=hf, the default; --to=safetensors keeps the "
                "names, here lm_head.weight, model.embed.weight,",
            ),
            ("hf ''", "invalid TARGET='': expected a value"),
            ("hf out --model=", "invalid --model='': expected a value"),
            (
                "hf out --to=hf --mesh=tp=2",
                "unexpected --mesh: it writes a file for each rank of --to=fsdp2, megatron, vllm, sglang",
            ),
            ("hf out --to=vllm", "--to=vllm needs --mesh"),
            ("hf out --to=megatron --mesh=tp=x --model=qwen3-8b", "invalid --mesh 'tp=x'"),
            ("hf out --unquantized=*", "unexpected --unquantized without --quantize"),
            ("hf out --to=safetensors --convert=inf", "unexpected --convert without --dtype"),
            ("hf out --to=safetensors --dtype=fp8_e4m3 --convert=inf", "--convert=inf: "),
            ("hf out --to=safetensors --dtype=fp17", "--dtype=fp17: "),
            ("hf out --rename=a=b --rename=a=c", "--rename is given twice for 'a'"),
            ("hf out --to=torch-save --max-shard-size=1GB", "unexpected --max-shard-size"),
            ("hf out --to=torch-save --chunk=1MiB", "unexpected --chunk: a TARGET of --to=dcp"),
            ("hf out --chunk=1MiB", "unexpected --chunk: a TARGET of --to=dcp"),
            (
                "hf out --to=safetensors --only=*.none",
                "reshard-convert: error: --only: '*.none' in 'only' matches no param of the target",
            ),
            ("hf out --report=none/r.json", "--report=none/r.json: found no folder 'none'"),
            ("hf out --report=hf/r.json", "--report=hf/r.json is in 'hf', expected a file outside"),
            ("hf out --processes=0", "invalid --processes=0: expected 1 or more"),
            ("hf out --processes=2", "--processes=2 needs --transport=mpi or --transport=ucx"),
            ("hf out --processes=2 --transport=ucx --rank=2", "invalid --rank=2: expected 0 to 1"),
            (
                "hf out --processes=2 --transport=ucx --rendezvous=flie:///a",
                "rendezvous 'flie:///a': found the scheme 'flie', expected tcp://host:port",
            ),
            ("none out --processes=2 --transport=ucx --rendezvous=file:///none/a", "cannot make the folder '/none/a'"),
            ("hf out --processes=2 --transport=mpi --rendezvous=file:///none/a", "transport 'mpi' has no rendezvous"),
            ("hf out --insecure", "unexpected --insecure without --processes=N of 2 or more"),
            ("hf out --rank=0", "unexpected --rank without --processes=N of 2 or more"),
            ("hf out --to=pt", "invalid choice: 'pt'"),
        ):
            with self.subTest(arguments=arguments):
                self.cannot_convert(error, arguments)
                self.assertFalse((self.folder / "out").exists())

    def test_hostile_inputs(self):
        """A config.json, a model file, names and folders that nobody wrote by hand: one error that names them."""
        llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        config = self.folder / "hf/config.json"
        for contents, error in (
            (b"[" * 200_000, "config.json': lists and objects are nested more than 64 deep"),
            (b'{"a":' * 900 + b"1" + b"}" * 900, "config.json': lists and objects are nested more than 64 deep"),
            (b'{"a":' * 70 + b"1" + b"}" * 70, "config.json': lists and objects are nested more than 64 deep"),
            (b'{"a": "\xff"}', "config.json': 'utf-8' codec can't decode byte 0xff"),
            (b"[]", "config.json': expected a JSON object"),
            (b"{", "config.json': Expecting property name"),
            (b"", "config.json': Expecting value"),
            (b'{"n": 1' + b"0" * 5000 + b"}", "config.json': Exceeds the limit"),
            (
                b'{"architectures": "LlamaForCausalLM"}',
                "config.json': 'architectures' is \"LlamaForCausalLM\", expected a list of names",
            ),
            (b'{"architectures": [[1]]}', "config.json': 'architectures' is [[1]], expected a list of names"),
            (b'{"model_type": {}}', "config.json': 'model_type' is {}, expected a name"),
            (
                json.dumps(llama | {"tie_word_embeddings": "false"}).encode(),
                "config.json': 'tie_word_embeddings' is \"false\", expected true or false",
            ),
            (b'{"architectures": ["\\u001b[31m\\ud800"]}', "the library has no model for '\\x1b[31m\\ud800'"),
            (b" " * (16 << 20) + b"{}", "config.json' has 16777218 bytes, expected a config.json of at most 16777216"),
        ):
            config.write_bytes(contents)
            with self.subTest(error=error):
                self.one_error(error, "hf", "out")
                self.one_error(error.replace("hf/", ""), "hf", "out", "--config=hf/config.json", "--to=megatron")
        config.unlink()
        for make, error in (
            (config.mkdir, "hf/config.json' is a folder, expected a config.json"),
            (lambda: os.mkfifo(config), "hf/config.json' is no regular file"),
            (lambda: config.symlink_to("config.json"), "hf/config.json' is no regular file"),
            (lambda: config.symlink_to("nowhere"), "nowhere' is missing"),
        ):
            make()
            self.one_error(error, "hf", "out", "--to=hf")
            self.convert("hf kept --to=safetensors")  # which needs no config
            shutil.rmtree(self.folder / "kept")
            config.rmdir() if config.is_dir() else config.unlink()
        for arguments, error in (
            (("h\udcff", "out"), r"invalid SOURCE='h\\udcff': expected UTF-8"),
            (("hf", "out\udcff"), "invalid TARGET="),
            (("hf", "out", "--only=\udc80"), "invalid --only="),
            (("n" * 300, "out"), "File name too long"),
            (("hf", "n" * 300, "--to=safetensors"), "File name too long"),
            (("hf", "out", "--config=" + "n" * 300), "--config=n"),
            (("hf", "out", "--model=" + "n" * 300), "nnn.yaml': File name too long"),
            (("hf", "out", "--model=.yaml"), "--model=.yaml"),
            (("hf", "out\x1b[31m/x", "--to=safetensors"), "TARGET: control character in 'folder' of 'storage'"),
            (("loop", "out"), "loop"),
            (("hf", "loop", "--to=safetensors"), "'loop' exists"),
            (("hf", "out", "--model=model.yaml"), "model.yaml"),
        ):
            if not (self.folder / "loop").is_symlink():
                (self.folder / "loop").symlink_to("loop")
                (self.folder / "model.yaml").mkdir()
            with self.subTest(arguments=arguments):
                self.one_error(error, *arguments)

    def one_error(self, error: str, *arguments: str) -> None:
        done = subprocess.run(
            [*CONVERT, *map(os.fsencode, arguments)],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            timeout=100,
        )
        text = done.stderr.decode()
        self.assertIn(done.returncode, (2, 3), text)
        self.assertIn(error, text)
        self.assertRegex(text, r"\Areshard-(convert|exec): error: ")
        self.assertNotRegex(text.replace("\n", ""), r"Traceback|job\.yaml|[\x00-\x1f\x7f-\x9f]")
        self.assertFalse((self.folder / "out").exists())

    def named(self, name: str) -> None:
        """A checkpoint with a tensor of this name."""
        Dcp(self.folder / "named").whole({name: np.ones(2, np.float32)}).write()

    def test_hostile_names(self):
        """A name that no job can state is refused, and the error shows it."""
        for name, shown in (
            ("a\nb", '"a\\x0ab": [2]'),
            ("a\x1b[31mb", '"a\\x1b[31mb": [2]'),
            ("n" * 2000, "n" * 100),
            ("\ud800", "is not UTF-8"),
        ):
            self.named(name)
            with self.subTest(name=name[:20].encode("utf-8", "backslashreplace")):
                self.one_error(shown, "named", "out", "--to=safetensors")
        for name in ["a\u2028b", "null", "#", "~", "'q'", '"q"', "a: b", "*", "-", "true", "007", "🙂", "a\\b", "a=b"]:
            self.named(name)
            with self.subTest(name=name):
                self.convert("named out --to=safetensors")
                self.check("out", {name: np.ones(2, np.float32)})
                shutil.rmtree(self.folder / "out")

    def test_outputs_that_are_full(self):
        with open("/dev/full", "w") as full:
            self.assertEqual(
                self.convert("hf out --to=dcp", stdout=full.fileno(), code=2).stderr,
                "reshard-convert: error: standard output: No space left on device\n",
            )
            self.assertFalse((self.folder / "out").exists())
            self.assertEqual(self.start("hf hf", stderr=full).wait(100), 2)

    def test_a_folder_whose_name_is_not_utf8(self):
        folder = os.path.join(os.fsencode(self.folder), b"w\xff")
        os.mkdir(folder)
        shutil.copytree(self.folder / "hf", os.fsdecode(os.path.join(folder, b"hf")))
        done = run(*CONVERT, "hf", "out", "--to=safetensors", code=2, cwd=folder, env=self.environment)
        self.assertRegex(
            done.stderr,
            r"\Areshard-convert: error: '.*w\\\\udcff/.*' is not UTF-8, expected a "
            r"path that a job can state",
        )

    def test_an_output_that_cannot_show_all_names(self):
        self.save_checkpoint("hf", {"größe": np.ones(2, np.float32)})
        self.environment = self.environment | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
        try:
            self.cannot_convert("here gr\\xf6\\xdfe", "hf out")
            self.convert("hf out --to=safetensors --rename=gr=g")
        finally:
            del self.environment
        self.check("out", {"göße": np.ones(2, np.float32)})


if __name__ == "__main__":
    unittest.main()

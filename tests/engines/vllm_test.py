# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines, refitted through their plug-in while they live: a plain trainer, FSDP2 and Megatron-Core on two
ranks, tp 1 and 2, vLLM's default executor with spawned workers. After five optimizer steps the tokens and
log-probabilities are those of a fresh engine that loads the trained checkpoint. See vllm_refit.py.

    make test-engines"""

import json
import os
import re
import subprocess
import sys
import time
import unittest
from pathlib import Path

import torch
import transformers

import support
from commands import run
from documents import example, examples
from module import python_path
from vllm_engines import OPTIONS

HERE = Path(__file__).resolve().parent
EXPERTS = {"w13_weight", "w2_weight"}
#: Models, with the params that vLLM repacks on every CPU and that therefore arrive in landing memory. With
#: AVX-512 there are more.
FAMILIES = {
    "qwen3-8b": set(),
    "qwen3-tied": set(),
    "llama3-8b": set(),
    "llama-1-kv-head": set(),
    "qwen2.5-7b": set(),
    "nemotron-h-8b": set(),
    "qwen3-30b-a3b": EXPERTS,
    "mixtral-8x7b": EXPERTS,
    "gpt-oss-120b": EXPERTS,
    "glm-4.5": EXPERTS,
    "deepseek-v3": EXPERTS,
    "gemma-4-31b": set(),
}
#: Persistent buffers of the checkpoint, by their last name.
BUFFERS = {"gemma-4-31b": {"layer_scalar"}}
#: What an engine has that a plan cannot state, and the error. The last two need experts.
UNSTATED = {
    "eplb": "found enable_eplb, expected it off",
    "draft": "found speculative decoding by 'eagle3' with draft model 'the/draft', expected none",
    "round robin": "found expert_placement_strategy 'round_robin', expected linear",
    "rebalanced": "found enable_eplb, expected it off",
}
#: The layout `vllm` with q and k exchanged in the pack: the shapes are the same.
SWAPPED = """layouts:
  swapped:
    extend: vllm
    params:
      model.layers.{layer}.self_attn.qkv_proj.weight:
        concat:
          - "{layer}.self_attn.k_proj.weight"
          - "{layer}.self_attn.q_proj.weight"
          - "{layer}.self_attn.v_proj.weight"
        shard: {0: {axis: tp, unit: head_dim, replicate: true}}
"""


class EngineTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = support.module_folder(cls)
        cls.environment = os.environ | {
            "PYTHONPATH": python_path(cls.folder / "module"),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }

    def model(self, name, checkpoints="A"):
        """Makes a small model and its checkpoints, as far as another test has not made them."""
        import reshard

        at = self.folder / name
        if not at.exists():
            support.model(self.folder, name, support.CASES)
            if name == "qwen3-8b":
                (at / "model.yaml").write_text((at / "model.yaml").read_text() + SWAPPED)
            (at / "hf.yaml").write_text(
                "version: 1\nmodel: model.yaml\nsource: {layout: hf, mesh: {}}\ntarget: {layout: hf, mesh: {}}\n"
            )
        for seed, checkpoint in enumerate(checkpoints):
            if (at / checkpoint).exists():
                continue
            support.checkpoint(
                at / checkpoint, reshard.compile(at / "hf.yaml").params(0, "source"), seed, copies=checkpoint == "A"
            )


class Families(EngineTest):
    """One engine of each family, from checkpoint A to B."""

    def test_families(self):
        cases = os.environ.get("CASES", " ".join(FAMILIES)).split()
        for name in cases:
            self.model(name, "AB")
        run(
            sys.executable,
            "-W",
            "ignore",
            HERE / "vllm_families.py",
            self.folder,
            *cases,
            env=self.environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        )
        for name, repacked in ((name, FAMILIES[name]) for name in cases):
            with self.subTest(model=name):
                result = json.loads((self.folder / name / "result.json").read_text())
                self.assertNotEqual(result["before"], result["fresh"])
                self.assertEqual(result["after"], result["fresh"], "the refitted engine differs from a fresh one")
                self.assertEqual(
                    result["wrong"], [], "params that differ from those of a fresh engine, as the kernels read them"
                )
                self.assertLessEqual(repacked, {each.rpartition(".")[2] for each in result["beside"]})
                self.assertGreater(result["in place"], 10)
                self.assertIn(
                    "o_proj.weight': the module has it, but not the plan; expected it in the plan or in left",
                    result["uncovered"],
                )
                self.assertIn("o_proj.weight': found in left and in the plan, expected one of them", result["both"])
                self.assertIn("left: 'nothing' matches no param or buffer", result["unknown"])
                self.assertIn("cannot make the folder '/none/store'", result["wrong URL"])
                if unbound := result.get("unbound"):
                    self.assertEqual(unbound["engine"], "a weight without memory")
                    self.assertEqual(
                        unbound["trainer"], "rank 1 has failed: a weight without memory: with rank 1 in prepare"
                    )
                    self.assertLess(unbound["seconds"], 60, "the deadline is 300 s")
                self.assertEqual(
                    result["without draft"], result["uncovered"], "speculative decoding by n-grams has no draft model"
                )
                self.assertEqual(set(result.get("buffers", {})), BUFFERS.get(name, set()))
                for buffer, text in result.get("buffers", {}).items():
                    self.assertIn(
                        f".{buffer}': the module has it, but not the plan; expected it in the plan or in left", text
                    )
                texts = {state: text for state, text in UNSTATED.items() if repacked or state in ("eplb", "draft")}
                for when in ("unstated", "unstated later"):
                    self.assertEqual(set(result[when]), set(texts), when)
                    for state, text in texts.items():
                        self.assertIn(text, result[when][state], (when, state))
                        self.assertEqual(
                            when == "unstated later",
                            "the weights are those of the version before" in result[when][state],
                            (when, state),
                        )


class Documented(EngineTest):
    """The programs of docs/integrations.md and docs/record.md."""

    def launched(self, name, checkpoint, program, *launcher, **files):
        """Runs a program of a document with a small model, and vLLM's default: it spawns its processes. What it prints
        must change from step to step. files: further files beside the program, by their names without .yaml."""
        at = self.folder / name
        (at / "store").mkdir(parents=True, exist_ok=True)
        (at / "checkpoint").symlink_to(checkpoint)
        options = ", ".join(f"{name}={value!r}" for name, value in OPTIONS.items())
        for found, replaced in (
            ("file:///shared/refit", f"file://{at}/store"),
            ('{"backend": "reshard"})', f'{{"backend": "reshard"}}, {options})'),
            ("SamplingParams(temp", "SamplingParams(detokenize=False, temp"),
            ("timeout=60", "timeout=300"),
        ):
            self.assertEqual(program.count(found), 1, found)
            program = program.replace(found, replaced)
        (at / "refit.py").write_text(program)
        for file, text in files.items():
            (at / f"{file}.yaml").write_text(text)
        environment = {
            name: value for name, value in self.environment.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"
        }
        done = run(sys.executable, "-W", "ignore", *launcher, "refit.py", env=environment, cwd=at, timeout=900)
        tokens = re.findall(r"^(\d) (\[.*\])$", done.stdout, re.MULTILINE)
        self.assertEqual([step for step, _ in tokens], ["0", "1", "2"], done.stdout + done.stderr[-4000:])
        self.assertEqual(
            len({generated for _, generated in tokens}), 3, "each step must change what the engine generates"
        )

    def test_torchrun(self):
        """The first one of docs/integrations.md: two ranks of torchrun, and two workers that vLLM spawns."""
        self.model("qwen3-8b")
        program, job = examples("vLLM", "python")[0], example("vLLM", "yaml")
        self.assertEqual(job.count("\n"), 12)
        self.launched(
            "torchrun",
            self.folder / "qwen3-8b" / "A",
            program.replace("timeout=60", "timeout=60, check=True"),
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            refit=job.replace("LIBRARY", str(support.MODELS.parent)),
        )

    def test_recorded(self):
        """The program of docs/record.md, with an architecture that the library lacks."""
        at = self.folder / "granite"
        at.mkdir()
        config = {
            **support.BASE,
            "architectures": ["GraniteForCausalLM"],
            "model_type": "granite",
            "intermediate_size": 512,
            "hidden_act": "silu",
            "pad_token_id": 0,
        }
        (at / "config.json").write_text(json.dumps(config))
        config = transformers.AutoConfig.from_pretrained(at)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(at)
        words = [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            "import sys; from reshard_record.command import run; sys.exit(run(sys.argv[1:]))",
        ]
        done = run(*words, "vllm", "--model", at, "--tp", "2", "-o", at / "recorded.yaml", env=self.environment)
        self.assertEqual(done.stderr.splitlines()[-1:], ["reshard-record: 27 params, exact"], done.stderr)
        self.assertNotIn("INFO", done.stderr + done.stdout)
        self.launched(
            "recorded",
            at,
            example("From the file to a refit", "python", "record"),
            model=(at / "recorded.yaml").read_text(),
        )

    def test_vocabulary(self):
        """The second one of docs/integrations.md."""
        self.model("qwen3-8b", "AB")
        run(
            sys.executable,
            "-W",
            "ignore",
            HERE / "vllm_documented.py",
            self.folder,
            env=self.environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        )
        result = json.loads((self.folder / "documented.json").read_text())
        self.assertEqual(result["refitted weights"], result["A weights"])
        self.assertEqual(result["refitted"], result["A"])
        self.assertNotEqual(result["A"], result["B"])


class Refit(EngineTest):
    def refitted(self, name, trainers, tp, case, kind="fsdp2"):
        """The result of the trainer's rank 0."""
        self.model(name)
        at = f"{name}/{kind}{trainers}to{tp}.{case}"
        environment = dict(self.environment)
        environment.pop(
            "VLLM_ENABLE_V1_MULTIPROCESSING", None
        )  # vLLM's default: the engine and its workers are spawned
        ranks = []
        for rank in range(trainers):
            with open(self.folder / f"{at}.log{rank}", "w") as log:
                ranks.append(
                    subprocess.Popen(
                        [
                            sys.executable,
                            HERE / "vllm_refit.py",
                            self.folder,
                            name,
                            kind,
                            str(trainers),
                            str(tp),
                            str(rank),
                            case,
                        ],
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            deadline = time.monotonic() + 1500
            while any(process.poll() is None for process in ranks) and not any(process.poll() for process in ranks):
                self.assertLess(time.monotonic(), deadline, "the refits took more than 25 minutes")
                time.sleep(1)
            for rank, process in enumerate(ranks):
                self.assertIn(process.poll(), (0, None), (self.folder / f"{at}.log{rank}").read_text()[-8000:])
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return json.loads((self.folder / f"{at}.json").read_text())

    def check(self, name, trainers=1, tp=1, kind="fsdp2"):
        result = self.refitted(name, trainers, tp, "steps", kind)
        self.assertEqual(result["weights"], result["fresh weights"])
        self.assertEqual(result["steps"][-1], result["fresh"], "the refitted engine differs from a fresh one")
        for before, after in zip(result["steps"], result["steps"][1:]):
            self.assertNotEqual(before, after, "a step must change what the engine generates, or nothing is shown")
        self.assertRegex(result["late"]["error"], "world rank .*; the weights are (those of the version before|torn)")
        self.assertLess(result["late"]["seconds"], 30)
        if "the version before" in result["late"]["error"]:
            self.assertEqual(result["after late"], result["fresh"])
        (self.assertNotEqual if name == "qwen3-8b" else self.assertEqual)(result["swapped"], result["fresh"])
        if tp > 1:
            self.assertIn(
                "; the weights are torn",
                result["partial"]["error"],
                "some workers have the weights of this version, others those before",
            )
        return result

    def test_qwen3_plain_to_tp1(self):
        self.check("qwen3-8b")

    def test_qwen3_plain_to_tp2(self):
        self.check("qwen3-8b", tp=2)

    def test_qwen3_fsdp2_to_tp2(self):
        self.check("qwen3-8b", trainers=2, tp=2)

    def test_qwen3_megatron_to_tp2(self):
        """A live GPTModel, tensor parallel over two ranks. The checkpoint that the fresh engine
        loads computes the same."""
        result = self.check("qwen3-8b", trainers=2, tp=2, kind="megatron")
        self.assertLess(result["distance"], 1e-4, "the saved checkpoint is not the trainer's model")

    def test_gpt_oss_plain_to_tp2(self):
        """Experts that vLLM repacks; of their bias the workers are summed, so vLLM has it on the first one only."""
        self.check("gpt-oss-120b", tp=2)

    def test_a_worker_is_killed_in_an_update(self):
        result = self.refitted("qwen3-8b", 1, 2, "killed")
        self.assertNotEqual(result["killed"]["error"], "")
        self.assertLess(result["killed"]["seconds"], 60, "the trainer waits for its deadline of 20 s, twice at most")
        self.assertNotEqual(result["restarted"], result["fresh"])
        self.assertEqual(result["weights"], result["fresh weights"])
        self.assertEqual(result["steps"][-1], result["fresh"], "the engine that was restarted differs from a fresh one")


if __name__ == "__main__":
    unittest.main()

# SPDX-License-Identifier: Apache-2.0
"""The recipes of docs/checkpoints.md with the real frameworks, scaled down: reshard-convert, given config.json and no
YAML. FSDP2 on four ranks to transformers, to two ranks, and to Megatron-Core's names and back; live Megatron-Core
models to transformers and from it; block FP8 for transformers.

    scripts/frameworks.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/engines/convert_recipes_test.py"""

import json
import os
import unittest

import torch

import ranks
from commands import CONVERT, run, words_of
from megatron_checkpoint_test import QWEN2, load, state
from megatron_test import LENGTH, MISSING, Model
from optimizer_test import CONFIG, Training, folder

QWEN = QWEN2 | {"torch_dtype": "float32"}
TOKENS = torch.arange(LENGTH).mul(7).add(3).remainder(70).unsqueeze(0)


def logits(path):
    """Those of transformers' model of a checkpoint."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        return model(TOKENS).logits


def save(rank):
    """FSDP2 on all ranks, three steps of Adam; only weights, state and config.json remain."""
    import torch.distributed.checkpoint as dcp

    training = Training()
    training.train(0)
    dcp.save(training.state(), checkpoint_id=str(folder() / "saved"))
    with torch.no_grad():
        found = training.model(TOKENS).logits  # of all ranks
    if rank == 0:
        torch.save(found, folder() / "logits.pt")
        (folder() / "saved/config.json").write_text(json.dumps(CONFIG))


def resume(rank):
    """What PyTorch loads from the converted checkpoint is what it loads from its own."""
    training = Training()
    training.train(0)
    training.load("saved")
    expected = training.values()
    training.train(0)
    training.load("resumed")
    ranks.same(training.values(), expected)


def save_megatron(rank):
    """Megatron-Core on four ranks."""
    from megatron.core import dist_checkpointing

    source = Model(1, tp=2, pp=2)
    found = source.logits()
    if rank == 0:
        torch.save(found, folder() / "logits.pt")
        (folder() / "iter_0001000").mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(state(source), str(folder() / "iter_0001000"))


def load_megatron(rank):
    """Megatron-Core on four ranks, with other values before."""
    model = Model(2, pp=4)
    load(model, folder() / "to-megatron")
    torch.testing.assert_close(model.logits(), torch.load(folder() / "logits.pt"), rtol=1e-5, atol=1e-5)


class Conversions(ranks.RanksTest):
    """Tests that convert checkpoints in their folder."""

    def convert(self, *arguments):
        """Runs reshard-convert. Returns what it printed."""
        path = {"PYTHONPATH": str(self.folder / "module")}
        done = run(*CONVERT, *words_of(*arguments), cwd=self.folder, env=os.environ | path, timeout=300)
        self.assertTrue(done.stdout.endswith("were compared with the source and are right\n"), done.stdout)
        return done.stdout


@unittest.skipIf(MISSING, MISSING)
class RecipesTest(Conversions):
    def test_fsdp2(self):
        self.ranks(4, save)
        text = self.convert("saved hf --allow=extra")
        self.assertIn("layouts: fsdp2-checkpoint to hf\n", text)
        torch.testing.assert_close(
            logits(self.folder / "hf"), torch.load(self.folder / "logits.pt"), rtol=1e-5, atol=1e-6
        )

        self.convert("saved resumed --to=fsdp2 --optimizer")
        self.ranks(2, resume)

        self.assertIn(
            "with exp_avg, exp_avg_sq, param\n", self.convert("saved moved --to=megatron --optimizer --allow=extra")
        )
        self.convert("moved back --to=fsdp2 --optimizer --allow=extra --config=saved/config.json")
        digests = [
            {name: value for name, value in self.digests(path).items() if not name.endswith(".step")}
            for path in ("saved", "back")
        ]
        self.assertEqual(digests[0], digests[1])
        self.assertEqual(len(digests[0]), 3 * 30)

    def digests(self, path):
        """The digests of all tensors of a checkpoint, by name."""
        return json.loads(run("reshard-digest", self.folder / path, "--format=json").stdout)

    def test_megatron(self):
        self.ranks(4, save_megatron)
        (self.folder / "config.json").write_text(json.dumps(QWEN))
        self.assertIn("layouts: megatron-checkpoint to hf\n", self.convert("iter_0001000 from-megatron --allow=extra"))
        torch.testing.assert_close(
            logits(self.folder / "from-megatron"), torch.load(self.folder / "logits.pt"), rtol=1e-5, atol=1e-5
        )

        import transformers

        torch.manual_seed(5)
        transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**QWEN)).save_pretrained(self.folder / "qwen")
        torch.save(logits(self.folder / "qwen"), self.folder / "logits.pt")
        self.convert("qwen to-megatron --to=megatron")
        self.ranks(4, load_megatron)
        self.convert("to-megatron qwen-again --config=qwen/config.json --allow=extra")
        self.assertEqual(self.digests("qwen"), self.digests("qwen-again"))

    def test_fp8(self):
        """The names are those of transformers' FP8 models, and the values those that their codes and scales stand for.
        transformers itself reads such a model with the package accelerate only."""
        import transformers
        from safetensors.torch import load_file

        torch.manual_seed(6)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
        model.save_pretrained(self.folder / "bf16")
        expected = logits(self.folder / "bf16")
        self.convert("bf16 fp8 --quantize=block_fp8 --unquantized=*embed_tokens* --unquantized=lm_head* --copy=bf16")
        stated = transformers.FineGrainedFP8Config.from_dict(
            transformers.AutoConfig.from_pretrained(self.folder / "fp8").quantization_config
        )
        self.assertEqual(
            (tuple(stated.weight_block_size), stated.modules_to_not_convert),
            ((128, 128), ["model.embed_tokens", "lm_head"]),
        )
        stored = load_file(self.folder / "fp8/model.safetensors")
        scales = {
            name.removesuffix("_scale_inv"): value for name, value in stored.items() if name.endswith("_scale_inv")
        }
        self.assertEqual(len(scales), 3 * 7)  # all matrices of the layers
        with torch.no_grad():  # each of these matrices is one block
            model.load_state_dict(
                {
                    name: value.float() * scales[name] if name in scales else value
                    for name, value in stored.items()
                    if not name.endswith("_scale_inv")
                }
            )
            found = model(TOKENS).logits
        self.assertGreater((found - expected).abs().max(), 0)
        torch.testing.assert_close(found, expected, rtol=0.1, atol=0.05 * expected.abs().max().item())


if __name__ == "__main__":
    unittest.main()

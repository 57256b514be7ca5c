# SPDX-License-Identifier: Apache-2.0
"""transformers loads checkpoints that reshard-exec writes: of one file, of several, and of more than 5 GB
(RESHARD_FULL=1; 16 GB of disk, 12 GB of memory), with the config, generation config and tokenizer added by
--copy. It loads those of reshard-convert for a model whose embeddings are tied. transformers 5, and
transformers 4 in another process.

    scripts/frameworks.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/frameworks/from_pretrained_test.py
"""

import importlib.util
import json
import os
import sys
import unittest

from commands import ROOT, run
from conversions import ConvertTest
from module import python_path

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]

#: Loads a folder, compares it with the weights of another folder, and with the logits beside that if they are there,
#: and prints the version. Tensors that are tied share memory, and only one of them is in the files.
LOADS = """
import sys
from pathlib import Path
import torch, transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
written, original = sys.argv[1:]
model, report = AutoModelForCausalLM.from_pretrained(written, output_loading_info=True, dtype=torch.bfloat16)
assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
own, seen = model.state_dict(), 0
for file in sorted(Path(original).glob("*.safetensors")):
    for name, tensor in load_file(file).items():
        assert own[name].dtype == tensor.dtype, name
        assert torch.equal(own[name].view(torch.int16), tensor.view(torch.int16)), name  # NaNs too
        seen += 1
assert seen == len({tensor.data_ptr() for tensor in own.values()}), (seen, len(own))
shared = model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
assert shared == model.config.tie_word_embeddings, shared
assert GenerationConfig.from_pretrained(written).max_new_tokens == 17
assert AutoTokenizer.from_pretrained(written)("b c a").input_ids == [2, 3, 1]
with torch.no_grad():
    found = model(torch.tensor([[2, 3, 1]])).logits
logits = Path(original).parent / "logits.pt"
if logits.exists():
    torch.testing.assert_close(found, torch.load(logits), rtol=0.02, atol=0.005)
print(transformers.__version__)
"""

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
}


@unittest.skipIf(MISSING, f"NOT TESTED: {', '.join(MISSING)} missing; see tests/frameworks")
class FromPretrained(ConvertTest):
    def original(self, save, **config):
        """A folder saved by transformers, with weights if `save`, else only the config. With weights also the logits,
        in logits.pt beside it, and the model, as FSDP2 trainers save it, in dcp."""
        import tokenizers
        import torch
        import torch.distributed.checkpoint as dcp
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

        at = self.folder / "original"
        config = Qwen3Config(**{"tie_word_embeddings": False} | config, dtype="bfloat16")
        if save:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            model.generation_config.max_new_tokens = 17
            model.save_pretrained(at)
            dcp.save({"model": model.state_dict()}, checkpoint_id=self.folder / "dcp", no_dist=True)
            with torch.no_grad():
                torch.save(model(torch.tensor([[2, 3, 1]])).logits, self.folder / "logits.pt")
        else:
            config.architectures = ["Qwen3ForCausalLM"]
            config.save_pretrained(at)
            (at / "generation_config.json").write_text(json.dumps({"max_new_tokens": 17}))
        words = tokenizers.Tokenizer(
            tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "c": 3}, unk_token="[UNK]")
        )
        words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(at)
        tokenizer = at / "tokenizer_config.json"  # transformers 5 names a class that 4 does not have
        tokenizer.write_text(
            json.dumps(json.loads(tokenizer.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"})
        )
        return at

    def loads(self, written, original):
        self.assertTrue(run(sys.executable, "-W", "ignore", "-c", LOADS, written, original).stdout.startswith("5."))
        if four := os.environ.get("RESHARD_TRANSFORMERS4"):
            version = run(
                sys.executable,
                "-W",
                "ignore",
                "-c",
                LOADS,
                written,
                original,
                env=os.environ | {"PYTHONPATH": python_path(four)},
            ).stdout
            self.assertTrue(version.startswith("4."), version)

    def test_written_with_the_files_of_a_model(self):
        original = self.original(True, **SMALL)
        self.call(f"reshard-compile --describe={original} -o model.yaml")
        job = self.folder / "job.yaml"
        job.write_text("version: 1\nmodel: model.yaml\nsource: {storage: original}\ntarget: {storage: one}\n")
        self.call("reshard-compile", job, "-o", "plan")
        self.call(f"reshard-exec plan --check --copy={original}")
        self.call(f"reshard-exec plan --check --copy={original} --max-shard-size=64KiB --target=many")
        self.assertEqual([path.name for path in (self.folder / "one").glob("*.safetensors*")], ["model.safetensors"])
        self.assertGreater(len(list((self.folder / "many").glob("model-*-of-*.safetensors"))), 3)
        for name in ("one", "many"):
            with self.subTest(name):
                self.loads(self.folder / name, original)

    def test_tied_embeddings(self):
        """The source has the tied tensor under both names, as a DCP checkpoint of the model's state and as safetensors;
        the target has the files that transformers itself saves."""
        from safetensors.torch import load_file, save_file

        original = self.original(True, **SMALL, tie_word_embeddings=True)
        saved = load_file(original / "model.safetensors")
        self.assertNotIn("lm_head.weight", saved)
        (self.folder / "both").mkdir()
        both = saved | {"lm_head.weight": saved["model.embed_tokens.weight"].clone()}
        save_file(both, self.folder / "both/model.safetensors")
        for source in ("dcp", "both"):
            self.prints("lm_head.weight", "reshard-inspect", source)
            self.convert(
                source, f"from-{source}", "--to=hf", f"--config={original / 'config.json'}", f"--copy={original}"
            )
        first, second = (
            {path.name: path.read_bytes() for path in (self.folder / f"from-{source}").iterdir()}
            for source in ("dcp", "both")
        )
        self.assertEqual(first, second)
        self.assertEqual(load_file(self.folder / "from-dcp/model.safetensors").keys(), saved.keys())
        self.loads(self.folder / "from-dcp", original)

    @unittest.skipUnless("RESHARD_FULL" in os.environ, "RESHARD_FULL=1 writes more than 5 GB")
    def test_more_than_5_gb(self):
        layers, hidden, ffn, vocab, heads = 12, 4096, 14336, 32000, 32
        original = self.original(
            False,
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=vocab,
        )
        numbers = {
            "layers": layers,
            "hidden": hidden,
            "ffn": ffn,
            "vocab": vocab,
            "heads": heads,
            "kv_heads": 8,
            "head_dim": 128,
            "tied": "false",
        }
        job = self.folder / "job.yaml"
        models = ROOT / "examples" / "models"
        job.write_text(
            f"version: 1\nmodel: {models / 'qwen3-8b.yaml'}\nsource: {{layout: hf, storage: weights}}\n"
            f"target: {{layout: hf, storage: written}}\n"
        )
        self.call(
            "reshard-compile",
            job,
            "-o",
            "plan",
            *(f"--set=model.let.{name}={value}" for name, value in numbers.items()),
        )
        self.call("reshard-exec plan --synthesize --source=weights")
        self.call(f"reshard-exec plan --copy={original} --memory=2GiB")
        files = sorted((self.folder / "written").glob("model-*.safetensors"))
        self.assertEqual(
            [path.name for path in files], ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        )
        self.assertLess(files[0].stat().st_size, 5.001e9)
        self.assertGreater(sum(path.stat().st_size for path in files), 5e9)
        self.loads(self.folder / "written", self.folder / "weights")


if __name__ == "__main__":
    unittest.main()

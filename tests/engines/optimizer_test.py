# SPDX-License-Identifier: Apache-2.0
"""Training goes on after a conversion of weights and Adam's state: three steps of FSDP2 on two ranks, saved with
torch.distributed.checkpoint; reshard converts the checkpoint to safetensors and to Megatron-Core's names and back;
three more steps on four and on three ranks. Every weight and moment has the bits of the uninterrupted run, or, on three
ranks, where PyTorch sums gradients in another order, those after PyTorch's own load of its own checkpoint.

    scripts/frameworks.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/engines/optimizer_test.py"""

import json
import tempfile
import unittest
from pathlib import Path

import torch

import ranks
from commands import run
from support import MODELS

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "vocab_size": 72,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 44,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
}
#: The library's model in fp32 with Adam's state, and the names that dcp.save({"model": …, "optimizer": …}) gives them.
YAML = f"""extend: {MODELS}/llama3-8b.yaml
config: config.json
dtype: fp32
optimizer: {{exp_avg: fp32, exp_avg_sq: fp32, step: {{dtype: fp32, shape: []}}}}
layouts:
  saved: {{extend: fsdp2-checkpoint}}
  plain: {{extend: hf, optimizer: "{{param}}.{{state}}"}}
  megatron-optimizer: {{extend: megatron-checkpoint}}
"""
STEPS = 3


def folder():
    return Path(tempfile.gettempdir())


class Training:
    """A small Llama under FSDP2 on all ranks; each rank has the same batch."""

    def __init__(self, config=CONFIG):
        import transformers
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(7)
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).float()
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)

    def train(self, first):
        for step in range(first, first + STEPS):
            tokens = torch.arange(12).mul(5).add(3 * step).remainder(72).unsqueeze(0)
            self.model(tokens, labels=tokens).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self):
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, name):
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        found = self.state()  # PyTorch makes empty moments for it
        whole = name in ("saved", "resumed")
        if not whole:  # these came through safetensors, which cannot hold param_groups
            groups = found["optimizer"].pop("param_groups")
        dcp.load(found, checkpoint_id=str(folder() / name))
        if not whole:
            found["optimizer"]["param_groups"] = groups
        set_state_dict(self.model, self.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    def values(self):
        """All weights and moments, whole."""
        found = self.state()
        flat = {f"weight {name}": value for name, value in found["model"].items()}
        flat |= {
            f"{key} {name}": value for name, each in found["optimizer"]["state"].items() for key, value in each.items()
        }
        return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in flat.items()}


def begin(rank):
    """Trains, saves, and trains on without an interruption."""
    import torch.distributed.checkpoint as dcp

    training = Training()
    training.train(0)
    dcp.save(training.state(), checkpoint_id=str(folder() / "saved"))
    training.train(STEPS)
    values = training.values()
    if rank == 0:
        torch.save(values, folder() / "uninterrupted.pt")


def resumed(name):
    training = Training()
    training.train(0)  # other values, which the load replaces
    training.train(0)
    training.load(name)
    training.train(STEPS)
    return training.values()


def four(rank):
    """On four ranks the sums of equal gradients are exact, as on two."""
    expected = torch.load(folder() / "uninterrupted.pt")
    assert len(expected) == 4 * (3 * 9 + 3), len(expected)
    for name in ("again", "from-megatron"):
        ranks.same(resumed(name), expected)


def three(rank):
    ranks.same(resumed("again"), resumed("saved"))


@unittest.skipIf(ranks.MISSING, ranks.MISSING)
class OptimizerTest(ranks.RanksTest):
    def convert(self, source, target, *flags):
        (self.folder / "job.yaml").write_text(f"version: 1\nmodel: model.yaml\nsource: {source}\ntarget: {target}\n")
        run("reshard-compile", self.folder / "job.yaml", "-o", self.folder / "p.rplan", *flags)
        run("reshard-exec", self.folder / "p.rplan", "--check", "--allow=extra", cwd=self.folder)

    def test_training_goes_on(self):
        (self.folder / "config.json").write_text(json.dumps(CONFIG))
        (self.folder / "model.yaml").write_text(YAML)
        self.ranks(2, begin)
        self.convert("{layout: saved, storage: saved}", "{layout: plain, storage: plain}")
        self.convert("{layout: plain, storage: plain}", "{layout: saved, storage: {folder: again, format: dcp}}")
        # Megatron-Core has the step among its param_groups: the names of the weights and the moments go there and back.
        self.convert(
            "{layout: saved, storage: saved, ignore: '*.step'}",
            "{layout: megatron-optimizer, storage: {folder: megatron, format: megatron}}",
        )
        self.convert(
            "{layout: megatron-optimizer, storage: megatron}", "{layout: plain, storage: moments, ignore: '*.step'}"
        )
        self.joined()
        self.ranks(4, four)
        self.ranks(3, three)

    def joined(self):
        """`from-megatron`: the moments that came back, with the steps of the checkpoint of PyTorch."""
        from safetensors.torch import load_file, save_file

        steps = {
            name: value
            for name, value in load_file(self.folder / "plain/model.safetensors").items()
            if name.endswith(".step")
        }
        (self.folder / "both").mkdir()
        save_file(load_file(self.folder / "moments/model.safetensors") | steps, self.folder / "both/model.safetensors")
        self.convert("{layout: plain, storage: both}", "{layout: saved, storage: {folder: from-megatron, format: dcp}}")


if __name__ == "__main__":
    unittest.main()

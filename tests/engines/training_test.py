# SPDX-License-Identifier: Apache-2.0
"""A training run moves from FSDP2 to Megatron-Core's distributed optimizer and back. Three steps of FSDP2 on two
ranks; reshard-convert; Megatron-Core loads weights, master weights and moments into a live optimizer on four ranks,
tensor parallel and in stages, and trains on; reshard-convert; FSDP2 trains on, on two and on three ranks. What
Megatron-Core loaded has the bits of the FSDP2 run, converted by hand (tests/lib/llama_names.py); its further steps are
those after its own load of its own checkpoint; the last steps of FSDP2 are those of a run that is given
Megatron-Core's state by hand.

    scripts/frameworks.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/engines/training_test.py"""

import json
import unittest

import torch

import ranks
from convert_recipes_test import Conversions
from documents import examples
from llama_names import joined, split
from megatron_test import MISSING, Model, stage
from optimizer_test import CONFIG, STEPS, Training, folder

if not MISSING:
    import megatron_training

    from megatron.core.transformer.transformer_config import TransformerConfig

#: The numbers of megatron_test.Model. 28 rows of Megatron-Core's vocabulary are padding.
LLAMA = CONFIG | {"num_hidden_layers": 4, "intermediate_size": 48, "vocab_size": 100}
PADDED = 128
HEADS = LLAMA["num_attention_heads"], LLAMA["num_key_value_heads"], LLAMA["head_dim"]
MESHES = {"tensor": {"tp": 2}, "stages": {"pp": 2}}
#: The names of the weights, the master weights and the moments in Megatron-Core's checkpoints begin with these.
MEGATRON = {
    "weight": "",
    "param": "optimizer.state.param.",
    "exp_avg": "optimizer.state.exp_avg.",
    "exp_avg_sq": "optimizer.state.exp_avg_sq.",
}
#: How docs/checkpoints.md loads what reshard wrote.
TO_MEGATRON, TO_FSDP2 = examples("As the source or the target of a job", "python", "checkpoints")[:2]


class Llama(Model):
    """The model of FSDP2, without biases."""

    def build(self, experts, tied, vocabulary):
        return stage(TransformerConfig(**self.settings(experts)), vocabulary, tied)


def stored(name):
    """All tensors of a checkpoint of PyTorch or Megatron-Core, read by PyTorch."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    known = dcp.FileSystemReader(folder() / name).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(each.size, dtype=each.properties.dtype)
        for key, each in known.items()
        if isinstance(each, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=folder() / name, no_dist=True)
    return state


def kinds(state):
    """{weight, exp_avg, …: {name of the weight: tensor}} of a checkpoint of FSDP2."""
    found = {
        "weight": {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}
    }
    for kind in ("exp_avg", "exp_avg_sq"):
        found[kind] = {
            name.removeprefix("optimizer.state.").removesuffix(f".{kind}"): value
            for name, value in state.items()
            if name.endswith(f".{kind}")
        }
    return found


def begin(rank):
    """FSDP2."""
    import torch.distributed.checkpoint as dcp

    training = Training(LLAMA)
    training.train(0)
    dcp.save(training.state(), checkpoint_id=str(folder() / "saved"))
    if rank == 0:
        (folder() / "saved/config.json").write_text(json.dumps(LLAMA))


def by_hand():
    """The state of FSDP2 in the names of Megatron-Core."""
    weights = kinds(stored("saved"))
    weights["param"] = weights["weight"]
    named = {
        prefix + name: value
        for kind, prefix in MEGATRON.items()
        for name, value in joined(weights[kind], *HEADS).items()
    }
    for name, value in named.items():
        if name.endswith(("word_embeddings.weight", "output_layer.weight")):
            named[name] = torch.nn.functional.pad(value, (0, 0, 0, PADDED - len(value)))
    return named


def megatron(rank):
    """Megatron-Core: the state that FSDP2 had, and three more steps."""
    expected = by_hand()
    for name, mesh in MESHES.items():
        with megatron_training.OnCpu():
            training = megatron_training.Training(Llama(2, **mesh, vocabulary=PADDED), None)
            program = {}
            exec(TO_MEGATRON, program)
            arguments = training.model.module, training.optimizer, str(folder() / "moved"), STEPS
            try:
                program["load"](*arguments, "dp_reshardable")
                raise AssertionError("a checkpoint without buckets was loaded")
            except ValueError as error:
                assert "lacks ['optimizer.distributed.dp_group_idx_" in str(error), error
            program["load"](*arguments)
            training.save(rank, folder() / name, "fully_reshardable")
            ranks.same(stored(f"{name}/fully_reshardable"), expected)

            other = megatron_training.Training(Llama(3, **mesh, vocabulary=PADDED), None)
            other.load(folder() / name, "fully_reshardable")
            results = []
            for each in (training, other):
                torch.manual_seed(5)  # of the gradients in stages
                each.train()
                results.append({tuple(key): value for *key, value in megatron_training.held(each)})
            ranks.same(*results)
            assert all(
                group["step"] == 2 * STEPS
                for each in (training, other)
                for group in each.optimizer.param_groups
                if group["params"]
            )
            training.save(rank, folder() / f"{name}-more", "fully_reshardable")


def finish(rank):
    """FSDP2 again: the state that Megatron-Core had, and three more steps."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    for name in MESHES:
        training = Training(LLAMA)
        training.train(0)  # other values, which the load replaces
        exec(
            TO_FSDP2,
            {
                "model": training.model,
                "optimizer": training.optimizer,
                "folder": str(folder() / f"{name}-back"),
                "steps": 2 * STEPS,
            },
        )

        state = stored(f"{name}-more/fully_reshardable")
        given = {
            kind: split(
                {
                    key.removeprefix(prefix): value
                    for key, value in state.items()
                    if key.startswith(prefix or ("decoder.", "embedding.", "output_layer."))
                },
                *HEADS,
            )
            for kind, prefix in MEGATRON.items()
        }
        for kind in given.values():
            for key in ("model.embed_tokens.weight", "lm_head.weight"):
                kind[key] = kind[key][: LLAMA["vocab_size"]].contiguous()
        control = Training(LLAMA)
        control.train(0)
        moments = {
            key: {kind: given[kind][key] for kind in ("exp_avg", "exp_avg_sq")} | {"step": torch.tensor(2.0 * STEPS)}
            for key in given["weight"]
        }
        set_state_dict(
            control.model,
            control.optimizer,
            model_state_dict=given["param"],
            options=StateDictOptions(full_state_dict=True),
            optim_state_dict={"state": moments, "param_groups": control.state()["optimizer"]["param_groups"]},
        )
        for each in (training, control):
            each.train(2 * STEPS)
        ranks.same(training.values(), control.values())
        assert training.values()["step model.norm.weight"] == 3 * STEPS


@unittest.skipIf(MISSING, MISSING)
class TrainingTest(Conversions):
    def test_to_megatron_and_back(self):
        self.ranks(2, begin)
        self.assertIn(
            "with exp_avg, exp_avg_sq, param\nmaster weights: of TARGET, the weights of SOURCE\n",
            self.convert("saved", "moved", "--to=megatron", "--optimizer", "--allow=extra"),
        )
        self.ranks(4, megatron)
        for name in MESHES:
            text = self.convert(
                f"{name}-more/fully_reshardable",
                f"{name}-back",
                "--to=fsdp2",
                "--optimizer",
                "--allow=extra",
                "--config=saved/config.json",
            )
            self.assertIn("weights: of TARGET, the master weights of SOURCE\n", text)
        self.ranks(2, finish)
        self.ranks(3, finish)


if __name__ == "__main__":
    unittest.main()

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of live Megatron-Core models (torch_dist): what `dist_checkpointing.save` writes, converted to Hugging
Face, gives transformers' model the logits of the Megatron model; what reshard writes, `dist_checkpointing.load` reads
into a model of another parallelism, with the same bits that it reads from its own checkpoint.

    scripts/frameworks.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/engines/megatron_checkpoint_test.py"""

import inspect
import json
import os
import re
import shutil
import tempfile
import unittest
from fnmatch import fnmatch
from pathlib import Path

import torch

import ranks
from commands import CONVERT, run
from megatron_test import MISSING, VOCABULARY, Model
from support import MODELS

NUMBERS = "layers: 4, hidden: 32, heads: 4, kv_heads: 2, head_dim: 8, ffn: 48, vocab: 128"
#: The models of megatron_test.Model, as transformers states them.
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
}
#: The models of megatron_test.Model: Qwen2's architecture, and experts with a router bias.
DENSE = f"extend: {MODELS}/qwen2.5-7b.yaml\ndtype: fp32\nlet: {{{NUMBERS}, tied: false}}\n"
EXPERTS = (
    f"extend: {MODELS}/moe.yaml\nconfig: config.json\ndtype: fp32\n"
    f"let: {{{NUMBERS}, tied: false, experts: 4, moe_ffn: 24, router_bias: true}}\n"
    # The name that the local layer spec, without Transformer Engine, gives this norm in the checkpoint.
    "layouts:\n"
    "  local:\n    extend: megatron-checkpoint\n    params:\n      decoder.layers.pre_mlp_layernorm.weight: null\n"
    "      decoder.layers.mlp.linear_fc1.layer_norm_weight: {stack: layer, holds: "
    "'{layer}.post_attention_layernorm.weight'}\n"
    "  local-layers:\n    extend: megatron-checkpoint-layers\n    params:\n "
    "     decoder.layers.{layer}.pre_mlp_layernorm.weight: null\n"
    "      decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight: {holds: "
    "'{layer}.post_attention_layernorm.weight'}\n"
)
#: What the metadata says of a checkpoint that is not homogeneous, by the end of its layout's name.
FLAGS = {"layers": "non_homogeneous_layers", "singleton": "singleton_local_shards"}


def on_rank_0(rank, work):
    """The result of work() on rank 0, on every rank."""
    found = [None]
    if rank == 0:
        try:
            found[0] = work()
        except Exception as error:  # the other ranks wait
            found[0] = error
    torch.distributed.broadcast_object_list(found)
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def folder_of(rank):
    return Path(on_rank_0(rank, lambda: tempfile.mkdtemp(prefix="checkpoint-")))


def convert(folder, model, source, target):
    """Compiles and runs a job between two endpoints, in a folder. The model's config.json is there."""
    (folder / "model.yaml").write_text(model)
    (folder / "job.yaml").write_text(f"version: 1\nmodel: model.yaml\nsource: {source}\ntarget: {target}\n")
    run("reshard-compile", folder / "job.yaml", "-o", folder / "p.rplan")
    run("reshard-exec", folder / "p.rplan", "--check", "--allow=extra", cwd=folder)


def command(folder, *arguments, code=0):
    """Runs reshard-convert in a folder. Returns what it printed."""
    import reshard

    path = {"PYTHONPATH": str(Path(reshard.__file__).parents[1])}
    done = run(*CONVERT, *arguments, code=code, cwd=folder, env=os.environ | path, timeout=300)
    return done.stdout + done.stderr


def state(model, flag=""):
    model.use()
    return model.module.sharded_state_dict(metadata={flag: True} if flag else None)


def load(model, folder, flag=""):
    """What Megatron-Core reads into a model from a checkpoint. reshard writes no objects (`_extra_state`), so their
    absence is no error, as with --dist-ckpt-strictness=log_all; params are zero if they are absent."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    with torch.no_grad():
        for param in model.module.parameters():
            param.zero_()
    found = dist_checkpointing.load(state(model, flag), str(folder), strict=StrictHandling.LOG_ALL)
    model.module.load_state_dict({name: value for name, value in found.items() if name != "common"}, strict=False)
    return {
        name: value.detach().clone()
        for name, value in [*model.module.named_parameters(), *model.module.named_buffers()]
    }


def through(rank, yaml, layout, source, others, config="{}", left=(), recognized=False):
    """Saves a model, converts the checkpoint to Hugging Face and back, and reads the result into other models.
    `config`: config.json, empty if the model states all numbers. `left`: globs of the names that conversions leave
    out, in Megatron-Core and in Hugging Face. `recognized`: by reshard-convert, which finds model and layout, in place
    of jobs with this YAML."""
    from megatron.core import dist_checkpointing

    folder, flag = folder_of(rank), FLAGS.get(layout.rpartition("-")[2], "")
    on_rank_0(rank, (folder / "saved").mkdir)
    on_rank_0(rank, lambda: (folder / "config.json").write_text(config))
    dist_checkpointing.save(state(source, flag), str(folder / "saved"))
    torch.distributed.barrier()
    if recognized:
        text = on_rank_0(rank, lambda: command(folder, "saved", "hf", "--config=config.json", "--allow=extra"))
        assert f"layouts: {layout} to hf\n" in text, text
        on_rank_0(
            rank,
            lambda: command(
                folder,
                "hf",
                "ours",
                "--config=config.json",
                "--to=megatron",
                f"--target-layout={layout}",
                "--chunk=4KiB",
            ),
        )
    else:
        megatron, hf = (f", ignore: '{glob}'" for glob in left) if left else ("", "")
        saved, files = f"{{layout: {layout}, storage: saved{megatron}}}", f"{{layout: hf, storage: hf{hf}}}"
        ours = f"{{layout: {layout}, storage: {{folder: ours, format: megatron, chunk: 4KiB}}{megatron}}}"
        on_rank_0(rank, lambda: convert(folder, yaml, saved, files))
        on_rank_0(rank, lambda: convert(folder, yaml, files, ours))
    for other in others:
        expected = {
            name: value
            for name, value in load(other, folder / "saved", flag).items()
            if not any(fnmatch(name, glob) for glob in left)
        }
        found = load(other, folder / "ours", flag)
        ranks.same({name: found[name] for name in expected}, expected)
        assert any(value.any() for value in expected.values())
    return folder


def transformers_logits(folder, config):
    """The logits of transformers' model of a checkpoint in Hugging Face's format, in fp32."""
    import transformers

    (folder / "config.json").write_text(config)
    auto = (
        transformers.AutoModelForImageTextToText
        if "vision_config" in json.loads(config)
        else transformers.AutoModelForCausalLM
    )
    model, found = auto.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not found["missing_keys"] and not found["mismatched_keys"], found
    with torch.no_grad():
        return model(Model.tokens()).logits


def dense(rank, layout="megatron-checkpoint", **more):
    """Homogeneous, tensor and pipeline parallel; the logits of transformers' model."""
    source = Model(1, tp=2, pp=2)
    expected = source.logits()
    other = Model(2, pp=4)
    folder = through(rank, DENSE, layout, source, [other, Model(3, tp=4)], **more)
    torch.testing.assert_close(other.logits(), expected, rtol=1e-5, atol=1e-5)
    found = on_rank_0(rank, lambda: transformers_logits(folder / "hf", json.dumps(QWEN2)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def layers(rank):
    """Not homogeneous."""
    source = Model(1, tp=2, pp=2)
    through(rank, DENSE, "megatron-checkpoint-layers", source, [Model(2, tp=4)])


def singleton(rank):
    """singleton_local_shards: gate and up apart."""
    dense(rank, "megatron-checkpoint-singleton", config=json.dumps(QWEN2), recognized=True)


def experts(rank):
    """Experts: layers and experts are stacked; each layer's experts alone."""
    source = Model(1, pp=2, ep=2, experts=4)
    others = [Model(2, ep=4, experts=4), Model(3, tp=2, experts=4)]
    through(rank, EXPERTS, "local", source, others)
    through(rank, EXPERTS, "local-layers", source, others[:1])


def hashes(rank):
    """The hashes of all files, which Megatron-Core writes since 0.19: with the pinned version this checks nothing
    (scripts/newer_versions.sh runs another one). A file that was changed after it was saved is refused."""
    from megatron.core import dist_checkpointing

    if "verify_integrity" not in inspect.signature(dist_checkpointing.save).parameters:
        return
    folder = folder_of(rank)
    on_rank_0(rank, (folder / "saved").mkdir)
    dist_checkpointing.save(state(Model(1, tp=2, pp=2)), str(folder / "saved"), verify_integrity=True)
    torch.distributed.barrier()

    def check():
        (folder / "config.json").write_text(json.dumps(QWEN2))
        convert = ("saved", "hf", "--config=config.json", "--allow=extra")
        text = command(folder, *convert)
        assert re.search(r"verified +\d+ file\(s\) have the hashes in integrity.json", text), text
        shutil.rmtree(folder / "hf")
        with open(max((folder / "saved").glob("*.distcp"), key=lambda path: path.stat().st_size), "r+b") as file:
            file.seek(-2000, os.SEEK_END)
            byte = file.read(1)
            file.seek(-2000, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))
        text = command(folder, *convert, code=2)
        assert "integrity.json" in text and ".distcp" in text, text
        assert not (folder / "hf").exists()

    on_rank_0(rank, check)


@unittest.skipIf(MISSING, MISSING)
class MegatronCheckpointTest(ranks.RanksTest):
    def test_four_ranks(self):
        self.ranks(4, dense, layers, singleton, experts, hashes)


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The recipes of docs/checkpoints.md beside the usual way, on the same files. Prints a table: seconds, peak resident
memory, and medians of ratios over the rounds. recipes.py [GB] [ROUNDS]

    scripts/frameworks.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/bench/recipes.py 4 3

The usual way: torch.distributed.checkpoint's load into transformers' model and save_pretrained; Megatron-Core's
load_plain_tensors, the matrices split with PyTorch and save_file; from_pretrained, joined with PyTorch and
dist_checkpointing.save; dcp.load and dcp.save of weights and moments; from_pretrained, blocks of 128 x 128 quantized
with PyTorch and save_file. Its time is given without imports, and that of the whole process with them. reshard's is
that of the whole command, in which every byte is compared, with --memory=1GiB. dcp.save and Megatron-Core wait until
the data is on the device, and so does reshard there; save_pretrained and save_file do not, and neither does reshard
there (--no-sync). Each way is a process of its own. The files are in the page cache. Each run begins after a sync;
rounds alternate the order."""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from commands import BIN
from module import install

#: A dense model without its layers: 0.13 GB in bf16. Each layer has 0.12 GB.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "vocab_size": 16384,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
ALLOW = "--allow=extra"
EXPORT = ("--no-sync", "--quantize=block_fp8", "--unquantized=*embed_tokens*", "--unquantized=lm_head*")
#: Source, and the options of reshard-convert.
RECIPES = {
    "FSDP2 to Hugging Face": ("dcp", ("--no-sync", ALLOW)),
    "Megatron-Core to Hugging Face": ("megatron", ("--no-sync", ALLOW)),
    "Hugging Face to Megatron-Core": ("hf", ("--to=megatron",)),
    "resume on fewer nodes": ("training", ("--to=fsdp2", "--optimizer", ALLOW)),
    "FP8 export": ("hf", EXPORT),
}


def convert(folder, source, target, *options):
    subprocess.run(
        [
            sys.executable,
            "-c",
            "from reshard.commands import convert; convert()",
            folder / source,
            target,
            f"--config={folder / 'config.json'}",
            *options,
        ],
        env=os.environ | {"PYTHONPATH": str(folder / "module")},
        check=True,
        stdout=subprocess.DEVNULL,
    )


def layers(gigabytes):
    return max(1, round((gigabytes - 0.13) / 0.12))


def create(folder, gigabytes):
    """The sources: random weights of transformers' model as safetensors and, by reshard, in the other formats.
    `training` has a fifth of the layers, and two moments in fp32 for each weight in bf16."""
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers
    from safetensors.torch import save_file

    def state(count):
        config = transformers.LlamaConfig(**CONFIG, num_hidden_layers=count)
        with torch.device("meta"):
            found = transformers.LlamaForCausalLM(config).state_dict()
        block = torch.randn(1 << 20).to(torch.bfloat16)
        whole = lambda size: block.repeat(-(-size // len(block)))[:size]
        return config, {name: whole(tensor.numel()).reshape(tensor.shape) for name, tensor in found.items()}

    config, weights = state(layers(gigabytes))
    (folder / "hf").mkdir()
    save_file(weights, folder / "hf/model.safetensors", metadata={"format": "pt"})
    for path in (folder, folder / "hf"):
        config.save_pretrained(path)
    dcp.save({"model": weights}, checkpoint_id=folder / "dcp", no_dist=True)
    config.save_pretrained(folder / "dcp")
    convert(folder, "hf", folder / "megatron", "--to=megatron")
    small, weights = state(layers(gigabytes / 5))
    moments = {name: {each: tensor.float() for each in ("exp_avg", "exp_avg_sq")} for name, tensor in weights.items()}
    dcp.save({"model": weights, "optimizer": {"state": moments}}, checkpoint_id=folder / "training", no_dist=True)
    (folder / "small").mkdir()
    small.save_pretrained(folder / "small")


def quantized(weights):
    """Codes and scales of blocks of 128 x 128 for all matrices but those of the vocabulary."""
    import torch

    found = {}
    for name, value in weights.items():
        if value.dim() < 2 or "embed" in name or "lm_head" in name:
            found[name] = value
            continue
        blocks = value.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
        found[name] = (blocks / scale).to(torch.float8_e4m3fn).reshape(value.shape)
        found[f"{name}_scale_inv"] = scale[:, 0, :, 0].contiguous()
    return found


def usual(recipe, folder, target):
    """One conversion without reshard, in this process. Prints seconds and peak memory."""
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers
    from safetensors.torch import save_file

    from llama_names import joined, split

    megatron = "Megatron" in recipe
    if megatron:
        import megatron_cpu  # noqa: F401

        from megatron.core import dist_checkpointing

        torch.cuda.synchronize = lambda *_: None
        torch.distributed.init_process_group("gloo", init_method=f"file://{target}-store", rank=0, world_size=1)
    heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], CONFIG["head_dim"]
    begin, base = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    target.mkdir()
    if recipe == "FSDP2 to Hugging Face":
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
        )
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder / "dcp", no_dist=True)
        model.save_pretrained(target)
    elif recipe == "Megatron-Core to Hugging Face":
        save_file(
            split(dist_checkpointing.load_plain_tensors(str(folder / "megatron")), *heads), target / "model.safetensors"
        )
    elif recipe == "Hugging Face to Megatron-Core":
        weights = joined(transformers.AutoModelForCausalLM.from_pretrained(folder / "hf").state_dict(), *heads)
        dist_checkpointing.save(
            {name: dist_checkpointing.ShardedTensor.from_rank_offsets(name, value) for name, value in weights.items()},
            str(target),
        )
    elif recipe == "resume on fewer nodes":
        tensors = dcp.FileSystemReader(folder / "training").read_metadata().state_dict_metadata
        state = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in tensors.items()}
        dcp.load(state, checkpoint_id=folder / "training", no_dist=True)
        dcp.save(state, checkpoint_id=target, no_dist=True)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")
        save_file(quantized(model.state_dict()), target / "model.safetensors")
    print(json.dumps([time.monotonic() - begin, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 2**20]))


def ours(recipe, folder, target):
    """One conversion by reshard. Returns seconds and peak memory of the executor, in GiB."""
    source, options = RECIPES[recipe]
    if source == "training":
        options = (*options, f"--config={folder / 'small/config.json'}")
    report = Path(f"{target}.json")
    begin = time.monotonic()
    convert(folder, source, target, *options, "--memory=1GiB", f"--report={report}")
    return time.monotonic() - begin, json.loads(report.read_text())["peak_rss_bytes"] / 2**30


def main():
    gigabytes, rounds = float(sys.argv[1]) if len(sys.argv) > 1 else 4, int(sys.argv[2]) if len(sys.argv) > 2 else 3
    folder = Path(tempfile.mkdtemp(prefix="reshard-recipes-", dir=os.environ.get("TMPDIR", "/var/tmp")))
    try:
        install(folder)
        # In a process of its own: a process begins with the peak memory of the one that starts it.
        subprocess.run([sys.executable, "-W", "ignore", __file__, "--create", folder, str(gigabytes)], check=True)
        results = {}
        for turn in range(rounds):
            for recipe in RECIPES:
                for way in ("reshard", "usual")[:: 1 if turn % 2 else -1]:
                    out = folder / f"out-{turn}-{way}"
                    os.sync()
                    if way == "reshard":
                        result = ours(recipe, folder, out)
                    else:
                        begin = time.monotonic()
                        done = subprocess.run(
                            [sys.executable, "-W", "ignore", __file__, "--usual", recipe, folder, out],
                            capture_output=True,
                            text=True,
                        )
                        if done.returncode:
                            sys.exit(done.stderr)
                        result = [*json.loads(done.stdout.splitlines()[-1]), time.monotonic() - begin]
                    results.setdefault((recipe, way), []).append(result)
                    print(f"{recipe}, {way}: {result[0]:.2f} s, {result[1]:.2f} GiB", file=sys.stderr, flush=True)
                    shutil.rmtree(out)
        print(
            f"| {gigabytes:g} GB, {BIN.name} | reshard | usual | usual, with imports | usual ÷ reshard | with imports "
            f"÷ reshard | memory: reshard | usual |\n|---|{'---:|' * 7}"
        )
        for recipe in RECIPES:
            own, other = results[recipe, "reshard"], results[recipe, "usual"]
            median = statistics.median
            seconds = [median(run[0] for run in own), median(run[0] for run in other), median(run[2] for run in other)]
            ratios = [median(b[i] / a[0] for a, b in zip(own, other)) for i in (0, 2)]
            memory = [median(run[1] for run in runs) for runs in (own, other)]
            cells = [f"{each:.1f} s" for each in seconds] + [f"{each:.1f}" for each in ratios]
            cells += [f"{each:.2f} GiB" for each in memory]
            print(f"| {recipe} | {' | '.join(cells)} |")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--usual"]:
        usual(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    elif sys.argv[1:2] == ["--create"]:
        create(Path(sys.argv[2]), float(sys.argv[3]))
    else:
        main()

# SPDX-License-Identifier: Apache-2.0
"""reshard-convert: converts a checkpoint into another format, with the compiler and the executor."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ._library import PREFIX
from .compiler import run_compiler
from .errors import CompileError, Error

_FORMATS = ("safetensors", "dcp", "dcp-safetensors", "megatron", "torch-save")
_SHOWN = 8  # objects that an error names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reshard-convert", description="Converts a checkpoint: compiles a job for it, runs it, and compares every byte that was written.",
        epilog="exit codes: 0 success; 1 a check failed; 2 wrong usage or input; 3 a failure at run time")
    parser.add_argument("source", metavar="SOURCE", help="a folder of safetensors (Hugging Face), of torch.distributed.checkpoint or Megatron-Core, or a file of torch.save")
    parser.add_argument("target", metavar="TARGET", help="the folder to create; it appears only when it is complete")
    parser.add_argument("--to", choices=_FORMATS, default="safetensors", help="the format of TARGET (default: safetensors, as Hugging Face)")
    parser.add_argument("--rename", action="append", default=[], metavar="OLD=NEW",
                        help="names that begin with OLD begin with NEW in TARGET: 'model.=' removes a prefix, '=model.' adds one; may be given several times")
    parser.add_argument("--model", metavar="FILE", help="a model file, for other layouts than that of SOURCE; needs --source-layout and --target-layout")
    parser.add_argument("--source-layout", metavar="NAME", help="the layout of SOURCE, of --model")
    parser.add_argument("--target-layout", metavar="NAME", help="the layout of TARGET, of --model")
    parser.add_argument("--dtype", metavar="DTYPE", help="the dtype of floats in TARGET; values are rounded to the nearest (default: that of SOURCE)")
    parser.add_argument("--quantize", metavar="FORMAT", help="the quantized format of matrices in TARGET")
    parser.add_argument("--only", action="append", default=[], metavar="GLOB", help="convert only these params")
    parser.add_argument("--ignore", action="append", default=[], metavar="GLOB", help="leave these params out")
    parser.add_argument("--allow", choices=["extra"], help="extra: leave out objects that are no tensors, and tensors that the model does not know")
    parser.add_argument("--copy", metavar="DIR", help="copy config.json, the tokenizer and all other small files of DIR into TARGET")
    parser.add_argument("--memory", metavar="SIZE", help="keep the resident memory below SIZE, for example 4GiB")
    parser.add_argument("--max-shard-size", metavar="SIZE", help="the largest size of one file of TARGET (default: 5GB)")
    parser.add_argument("--resume", action="store_true", help="keep an unfinished TARGET if the conversion is killed or fails, and continue one that is there")
    parser.add_argument("--report", metavar="FILE", help="write a JSON report")
    parser.add_argument("--plan", action="store_true", help="print the job and do nothing")
    return parser


def _contents(source: str) -> dict:
    """What the files of a checkpoint contain."""
    done = subprocess.run([PREFIX / "bin" / "reshard-inspect", source, "--format=json"], capture_output=True, text=True)
    if done.returncode:
        raise Error(done.stderr.strip().removeprefix("reshard-inspect: error: "))
    return json.loads(done.stdout)


def _job(options: argparse.Namespace) -> str:
    """The text of the job. JSON is YAML."""
    source: dict = {"storage": str(Path(options.source).resolve())}
    target: dict = {"storage": {"folder": str(Path(options.target).resolve()), "format": options.to}}
    if options.model:
        model: object = str(Path(options.model).resolve())
        source |= {"layout": options.source_layout, "dtype": "stored"}
        target |= {"layout": options.target_layout}
    else:
        model = {"layouts": {"source": {"params": "same"}, "target": {"params": "same"}}}
        source["layout"], target["layout"] = "source", "target"
        if options.rename:
            model["layouts"]["target"]["rename"] = dict(entry.split("=", 1) for entry in options.rename)
    if options.dtype:
        target |= {"dtype": options.dtype, "convert": "rne"}
    if options.quantize:
        target["quantize"] = options.quantize
    for key in ("only", "ignore"):
        if getattr(options, key):
            target[key] = getattr(options, key)
    lines = ["version: 1"]
    if options.model:
        lines.append(f"model: {json.dumps(model)}")
    else:
        described = run_compiler([f"--describe={source['storage']}"]).splitlines()
        lines += ["model:", *(f"  {line}" for line in described), f"  layouts: {json.dumps(model['layouts'])}"]
    return "\n".join([*lines, f"source: {json.dumps(source)}", f"target: {json.dumps(target)}", ""])


def _check(options: argparse.Namespace) -> None:
    together = {"--model": options.model, "--source-layout": options.source_layout, "--target-layout": options.target_layout}
    if any(together.values()) and not all(together.values()):
        raise Error(f"--model, --source-layout and --target-layout belong together; missing: {', '.join(name for name, value in together.items() if not value)}")
    if options.model and options.rename:
        raise Error("unexpected --rename: with --model, the layouts state the names ('rename' of a layout)")
    for entry in options.rename:
        if "=" not in entry:
            raise Error(f"invalid --rename={entry!r}: expected OLD=NEW")
    beginnings = [entry.split("=", 1)[0] for entry in options.rename]
    if len(set(beginnings)) < len(beginnings):
        raise Error(f"--rename is given twice for {next(each for each in beginnings if beginnings.count(each) > 1)!r}, expected once")
    if options.max_shard_size and options.to == "torch-save":
        raise Error("unexpected --max-shard-size: torch-save writes one file")
    if Path(options.target).exists():
        raise Error(f"'{options.target}' exists, expected a folder to create")
    found = _contents(options.source)
    objects = sorted(found["objects"])
    print(f"{options.source}: {found['format']}, {len(found['tensors'])} tensors, {len(objects)} objects", file=sys.stderr if options.plan else sys.stdout)
    if objects and not options.allow:
        raise Error(f"'{options.source}' has {len(objects)} objects that are no tensors: {', '.join(objects[:_SHOWN])}"
                    f"{' …' if len(objects) > _SHOWN else ''}; --allow=extra leaves them out")


def run(arguments: Sequence[str]) -> int:
    """The command. Returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        _check(options)
        job = _job(options)
        if options.plan:
            print(job, end="")
            return 0
        with tempfile.TemporaryDirectory(prefix="reshard-convert-") as folder:
            (Path(folder) / "job.yaml").write_text(job)
            run_compiler([Path(folder) / "job.yaml", "-o", Path(folder) / "convert.rplan"])
            passed = [f"--{name.replace('_', '-')}={value}" for name in ("allow", "copy", "memory", "max_shard_size", "report")
                      if (value := getattr(options, name))]
            passed += ["--resume"] if options.resume else []
            return subprocess.run([PREFIX / "bin" / "reshard-exec", Path(folder) / "convert.rplan", "--check", *passed]).returncode
    except CompileError as error:
        print(error, file=sys.stderr)
    except Error as error:
        print(f"reshard-convert: error: {error}", file=sys.stderr)
    return 2

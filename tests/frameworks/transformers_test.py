# SPDX-License-Identifier: Apache-2.0
"""Live modules and saved checkpoints of transformers 5 and 4 (see support.py to run this): the library reads the
config.json of each release, the checkpoint has the library's names, and after a run to the layout of live modules
each tensor equals that of the saved module."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import support
from module import importable, python_path

#: Models that a release has no class for.
LACKS = {
    4: {
        "deepseek-v3.2",
        "gemma-4-31b",
        "glm-5",
        "minimax-m2",
        "ministral-3-8b",
        "nemotron-3-nano-30b-a3b",
        "nemotron-h-8b",
        "qwen3.5-35b-a3b",
        "qwen3.5-9b",
    },
    5: set(),
}


def check(name, generation, at):
    """Saves a model, reads its config.json, moves the checkpoint to the live layout and compares it with the live
    module."""
    import torch
    from safetensors.torch import load_file

    import reshard

    torch.manual_seed(7)
    module = support.live(support.config(name, at / "config.json"), "cpu")
    with torch.no_grad():
        for tensor in module.state_dict().values():  # norms and biases are initialized to ones and zeros
            tensor.copy_(torch.randn(tensor.shape))
    module.save_pretrained(at / "saved")
    mtp = "mtp: 0" if name in support.MTP else ""
    saved = "fsdp2, switches: {transformers: 4}" if name in support.OTHERWISE_SAVED else "hf"
    (at / "model.yaml").write_text(
        f"extend: {support.MODELS / (name + '.yaml')}\nconfig: saved/config.json\nlet: {{{mtp}}}\n"
    )
    (at / "job.yaml").write_text(
        f"version: 1\nmodel: model.yaml\nsource: {{layout: {saved}, storage: saved, dtype: stored}}\n"
        f"target: {{layout: fsdp2, mesh: {{}}, switches: {{transformers: {generation}}}, dtype: fp32}}\n"
    )
    plan = reshard.compile(at / "job.yaml", output=at / "plan")
    subprocess.run(
        [reshard._library.PREFIX / "bin" / "reshard-exec", plan.path, f"--target={at / 'out'}", "--check"],
        check=True,
        capture_output=True,
    )
    found = load_file(at / "out" / "rank-00000.safetensors")
    wanted = module.state_dict()
    assert sorted(found) == sorted(wanted), (sorted({*found} - {*wanted})[:4], sorted({*wanted} - {*found})[:4])
    wrong = [each for each in wanted if not torch.equal(found[each], wanted[each].detach().float())]
    assert not wrong, wrong
    return len(wanted)


class Transformers(unittest.TestCase):
    def generation(self, number, environment):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", __file__, "--check", str(number), folder],
                env=os.environ | environment,
                capture_output=True,
                text=True,
                timeout=900,
            )
        self.assertEqual(done.returncode, 0, done.stderr[-6000:])
        self.assertEqual(done.stdout.count("right"), len(support.CONFIGS) - len(LACKS[number]), done.stdout)

    def test_5(self):
        self.generation(5, {})

    def test_4(self):
        self.generation(4, {"PYTHONPATH": python_path(os.environ["RESHARD_TRANSFORMERS4"])})


def main():
    generation, folder = int(sys.argv[2]), Path(sys.argv[3])
    importable(folder)
    import transformers

    assert transformers.__version__.startswith(f"{generation}."), transformers.__version__
    for name in support.CONFIGS.keys() - LACKS[generation]:
        print(name, "right in", check(name, generation, support.model(folder, name)), "tensors")


if __name__ == "__main__":
    main() if sys.argv[1:2] == ["--check"] else unittest.main()

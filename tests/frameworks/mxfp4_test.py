# SPDX-License-Identifier: Apache-2.0
"""MXFP4 against transformers' dequantization of gpt-oss (see support.py to run this): codes and scales of random bytes
give the same bf16 values, and the codes that a run writes give the values that reshard-exec reads from them."""

import unittest

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from commands import FolderTest, run

EXPERTS, ROWS, COLUMNS = 3, 40, 96
JOB = """
version: 1
model:
  dtype: bf16
  index: {{expert: {experts}}}
  tensors: {{"w.{{expert}}": [{rows}, {columns}]}}
  layouts:
    plain: {{params: {{w: {{stack: expert, holds: "w.{{expert}}"}}}}}}
    quantized:
      params:
        w_blocks: {{stack: expert, holds: "w.{{expert}}", quantize: {{format: mxfp4, scale: w_scales}}}}
source: {{storage: in, layout: {source}}}
target: {{layout: {target}, mesh: {{}}}}
"""


def move(folder, source, target, tensors):
    """The tensors of the target after a run from a checkpoint with these tensors."""
    (folder / "in").mkdir(exist_ok=True)
    save_file(tensors, folder / "in" / "model.safetensors")
    (folder / "job.yaml").write_text(
        JOB.format(experts=EXPERTS, rows=ROWS, columns=COLUMNS, source=source, target=target)
    )
    for command in (
        ["reshard-compile", folder / "job.yaml", "-o", folder / "plan"],
        ["reshard-exec", folder / "plan", f"--source={folder / 'in'}", f"--target={folder / target}", "--check"],
    ):
        run(*command)
    return load_file(folder / target / "rank-00000.safetensors")


def dequantized(tensors):
    """What transformers makes of codes and scales."""
    blocks = tensors["w_blocks"].view(torch.uint8).reshape(EXPERTS, ROWS, COLUMNS // 32, 16)
    return convert_moe_packed_tensors(blocks, tensors["w_scales"].view(torch.uint8)).transpose(1, 2)


class Mxfp4(FolderTest):
    def setUp(self):
        super().setUp()
        torch.manual_seed(3)

    def same_bits(self, one, other):
        self.assertTrue(torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16)))

    def test_dequantization(self):
        tensors = {
            "w_blocks": torch.randint(0, 256, (EXPERTS, ROWS, COLUMNS // 2), dtype=torch.uint8),
            "w_scales": torch.randint(20, 240, (EXPERTS, ROWS, COLUMNS // 32), dtype=torch.uint8),
        }
        self.same_bits(move(self.folder, "quantized", "plain", tensors)["w"], dequantized(tensors))

    def test_quantization(self):
        values = torch.randn(EXPERTS, ROWS, COLUMNS) * torch.exp2(torch.randint(-9, 9, (EXPERTS, ROWS, 1)))
        values[:, 0] = 0
        found = move(self.folder, "plain", "quantized", {"w": values.bfloat16()})
        wide = dequantized(found)
        self.same_bits(move(self.folder, "quantized", "plain", found)["w"], wide)
        # Each value is within half a step of E2M1: at most 1 of 6, after division by the scale.
        scale = torch.exp2(found["w_scales"].view(torch.uint8).double() - 127).repeat_interleave(32, -1)
        self.assertLessEqual(((wide.double() - values.bfloat16().double()) / scale).abs().max().item(), 1)
        self.assertLessEqual((values.bfloat16().double() / scale).abs().max().item(), 6)


if __name__ == "__main__":
    unittest.main()

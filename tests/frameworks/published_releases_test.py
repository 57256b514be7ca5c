# SPDX-License-Identifier: Apache-2.0
"""Published quantized checkpoints against the code of their own releases (see support.py to run this): what
transformers loads from a gpt-oss checkpoint of MXFP4 blocks, dequantized, and what compressed-tensors makes of its
packed INT4 weights are the bits that a job writes."""

import json
import unittest

import torch
from safetensors.torch import load_file, save_file

import support
from commands import FolderTest

KIMI = {
    "layers": 3,
    "hidden": 64,
    "heads": 4,
    "experts": 4,
    "moe_ffn": 96,
    "first_dense": 1,
    "ffn": 20,
    "q_lora": 7,
    "kv_lora": 5,
    "nope": 4,
    "rope": 2,
    "v_dim": 3,
    "vocab": 40,
}


def blocks_of(weight):
    """Codes [experts, rows, columns / 32, 16] and scales of a bf16 tensor [experts, rows,
    columns]: the nearest values."""
    from transformers.integrations.mxfp4 import FP4_VALUES

    groups = weight.float().unflatten(-1, (-1, 32))
    exponent = torch.ceil(torch.log2(groups.abs().amax(-1) / 6)).clamp(-120, 120)
    scaled = groups / torch.exp2(exponent)[..., None]
    codes = (scaled[..., None] - torch.tensor(FP4_VALUES)).abs().argmin(-1).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponent + 127).to(torch.uint8)


class Published(FolderTest):
    def move(self, model, source, target, out, *sets):
        self.write(
            "job.yaml", f"version: 1\nmodel: {model}\nsource: {{{source}}}\ntarget: {{{target}, convert: rne}}\n"
        )
        self.call("reshard-compile job.yaml -o plan", *[f"--set=model.let.{each}" for each in sets])
        self.call(f"reshard-exec plan --source=in --target={out} --check")
        return {
            name: tensor
            for path in sorted((self.folder / out).glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }

    def same_bits(self, found, wanted):
        self.assertEqual(sorted(found), sorted(wanted))
        for name, tensor in wanted.items():
            tensor = tensor.detach().contiguous()
            self.assertEqual((found[name].dtype, found[name].shape), (tensor.dtype, tensor.shape), name)
            self.assertTrue(torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name)

    def test_gpt_oss(self):
        """A live module of transformers, its experts as blocks: from_pretrained with `dequantize`, and a job to the
        layouts of live modules and of checkpoints in bf16."""
        from transformers import AutoModelForCausalLM, Mxfp4Config

        torch.manual_seed(11)
        self.write("config.json", json.dumps(support.CONFIGS["gpt-oss-120b"]))
        module = support.live(support.config("gpt-oss-120b", self.folder / "config.json"), "cpu")
        with torch.no_grad():
            for tensor in module.state_dict().values():
                tensor.copy_(
                    torch.randn(tensor.shape) * torch.exp2(torch.randint(-9, 9, (*tensor.shape[:-1], 1)).float())
                )
        module.save_pretrained(self.folder / "in")
        (at,) = (self.folder / "in").glob("*.safetensors")
        tensors = load_file(at)
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            tensors[name + "_blocks"], tensors[name + "_scales"] = blocks_of(tensors.pop(name).transpose(1, 2))
        save_file(tensors, at, metadata={"format": "pt"})
        config = self.json("in/config.json")
        config["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        }
        self.write("in/config.json", json.dumps(config))
        loaded = AutoModelForCausalLM.from_pretrained(
            self.folder / "in", quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
        )
        wanted = loaded.state_dict()
        experts = "model.layers.1.mlp.experts.down_proj"
        self.assertFalse(torch.equal(wanted[experts], module.state_dict()[experts]))
        model = self.folder / "model.yaml"
        model.write_text(f"extend: {support.MODELS / 'gpt-oss-120b.yaml'}\nconfig: in/config.json\n")
        self.same_bits(self.move(model, "layout: hf-mxfp4, storage: in", "layout: fsdp2, mesh: {}", "live"), wanted)
        self.same_bits(self.move(model, "layout: hf-mxfp4, storage: in", "layout: hf, storage: out", "hf"), wanted)

    def test_compressed_tensors(self):
        """Experts that compressed-tensors quantized and packed, and its own decompression."""
        from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        torch.manual_seed(12)
        arguments = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        model = support.MODELS / "kimi-k2.yaml"
        sets = [f"{name}={value}" for name, value in KIMI.items()]
        self.write(
            "job.yaml",
            f"version: 1\nmodel: {model}\nsource: {{layout: hf, storage: in}}\ntarget: {{layout: hf, storage: out}}\n",
        )
        self.call("reshard-compile job.yaml -o plan", *[f"--set=model.let.{each}" for each in sets])
        self.call("reshard-exec plan --synthesize --source=in")
        at = self.folder / "in" / "model.safetensors"
        wanted, published = load_file(at), {}
        for name, tensor in list(wanted.items()):
            if ".mlp.experts." not in name:
                published[name] = tensor
                continue
            weight = torch.randn(tensor.shape) * torch.exp2(torch.randint(-9, 9, (*tensor.shape[:-1], 1)))
            weight = weight.bfloat16()
            weight[0] = 0
            groups = weight.unflatten(1, (-1, 32))
            scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
            packed = PackedQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
            self.assertEqual(sorted(packed), ["weight_packed", "weight_scale", "weight_shape"])
            published |= {name.removesuffix("weight") + part: value for part, value in packed.items()}
            wanted[name] = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
        self.assertEqual(len([name for name in published if name.endswith("weight_packed")]), 24)
        save_file(published, at)
        self.same_bits(
            self.move(model, "layout: hf-int4, storage: in", "layout: hf, storage: out", "hf", *sets), wanted
        )

    def test_scales_of_int4(self):
        """Values that a job quantizes to int4 have the scales of compressed-tensors in bf16 (a group of zeros has 1
        there, and another number here), and its decompression gives the values that a job reads."""
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
        from compressed_tensors.quantization import QuantizationArgs
        from compressed_tensors.quantization.lifecycle.forward import dequantize
        from compressed_tensors.quantization.utils import calculate_qparams

        torch.manual_seed(13)
        weight = (torch.randn(64, 96) * torch.exp2(torch.randint(-9, 9, (64, 1)))).bfloat16()
        model = "{dtype: bf16, tensors: {w: [64, 96]}}"
        (self.folder / "in").mkdir()
        save_file({"w": weight}, self.folder / "in/model.safetensors")
        codes = self.move(model, "storage: in", "storage: out, quantize: int4", "codes")
        arguments = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
        groups = weight.unflatten(1, (-1, 32))
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
        self.assertTrue(torch.equal(codes["w_scale"], scale))
        values = unpack_from_int32(codes["w_packed"], 4, weight.shape)
        save_file(codes, self.folder / "in/model.safetensors")
        self.same_bits(
            self.move(model, "storage: in, quantize: int4", "storage: out", "back"), {"w": dequantize(values, scale)}
        )
        # The nearest integer, or a neighbor where compressed-tensors rounds the quotient to bf16 first.
        self.assertLessEqual(
            (values.float() - (groups.float() / scale.float()[..., None]).flatten(1)).abs().max().item(), 0.5 + 0.04
        )


if __name__ == "__main__":
    unittest.main()

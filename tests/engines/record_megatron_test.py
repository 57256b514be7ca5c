# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's own `sharded_state_dict()` of live models, recorded on every rank: the library's layouts
`megatron-local` put the same elements there, and so do the layouts that are inferred without the library. One process
acts as each rank in turn, over PyTorch's fake process group. Part of `make test-engines`."""

from __future__ import annotations

import re
import sys
import tempfile
import unittest
import warnings
from pathlib import Path

from record_support import recording

from commands import ROOT
from reshard import Error
from reshard_record.compiled import compare, compile_layout
from reshard_record.infer import mesh_text
from reshard_record.megatron import record_state, tensors_of_state

try:
    warnings.filterwarnings("ignore")
    import torch

    # Some modules request a GPU even if they are configured to initialize on the CPU.
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.Tensor.cuda = lambda self, *_, **__: self
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    MISSING = ""
except ImportError as error:
    MISSING = f"{error}: run scripts/frameworks.sh and build/frameworks/env.sh"

NUMBERS = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "vocab": 256}
EXPERTS = {"experts": 4, "moe_ffn": 24}
#: (model of the library, its numbers, tp, pp, ep, further settings of Megatron-Core)
CASES = [
    ("llama3-8b", NUMBERS, 1, 1, 1, {}),
    ("llama3-8b", NUMBERS, 2, 2, 1, {}),
    ("qwen2.5-7b", NUMBERS, 2, 1, 1, {"add_qkv_bias": True}),
    ("qwen3-0.6b", NUMBERS, 1, 4, 1, {"qk_layernorm": True}),
    ("qwen3-30b-a3b", NUMBERS | EXPERTS, 2, 2, 2, {"qk_layernorm": True}),
]


def states(numbers, tp, pp, ep, more, tied):
    """Yields the sharded state of each rank."""
    experts = (
        {"num_moe_experts": numbers["experts"], "moe_ffn_hidden_size": numbers["moe_ffn"]}
        if "experts" in numbers
        else {}
    )
    for rank in range(tp * pp):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp * pp)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=tp // ep,
            create_gloo_process_groups=False,
        )
        config = TransformerConfig(
            num_layers=numbers["layers"],
            hidden_size=numbers["hidden"],
            num_attention_heads=numbers["heads"],
            num_query_groups=numbers["kv_heads"],
            kv_channels=numbers["head_dim"],
            ffn_hidden_size=numbers["ffn"],
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            normalization="RMSNorm",
            add_bias_linear=False,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=tp // ep,
            pipeline_dtype=torch.bfloat16,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_cpu_initialization=True,
            **experts,
            **more,
        )
        module = GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm"),
            numbers["vocab"],
            64,
            position_embedding_type="rope",
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=tied,
        ).bfloat16()
        yield module.sharded_state_dict()
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def recordings(*case):
    """The recordings of all ranks."""
    model, numbers, tp, pp, ep, more = case
    mesh = {"tp": tp, "pp": pp, "views": [{"etp": tp // ep, "ep": ep, "pp": pp}]}
    of = list(states(numbers, tp, pp, ep, more, model == "qwen3-0.6b"))
    checkpoint = {name: entry for state in of for name, entry in tensors_of_state(state).items()}
    return mesh, [record_state(state, checkpoint=checkpoint, mesh=mesh, rank=rank) for rank, state in enumerate(of)]


def renamed(found, experts):
    """A recording with the library's names of experts, and of the norm before them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.json"
        found.save(path)
        text = re.sub(r"\.experts\.experts\.(\d+)\.(linear_fc\d)\.weight", r".experts.\2.weight\1", path.read_text())
        path.write_text(
            text.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight") if experts else text
        )
        return recording.Recording.open(path)


@unittest.skipIf(MISSING, MISSING)
class RecordMegatron(unittest.TestCase):
    def test_library(self):
        """The checkpoint has the elements of the library's layout `megatron` on one rank: the keys are those of
        Transformer Engine's modules."""
        count = 0
        for case in CASES:
            with self.subTest(case=case[:5]):
                mesh, found = recordings(*case)
                let = ", ".join(f"{name}: {value}" for name, value in case[1].items())
                library = f"extend: {ROOT / 'examples/models' / (case[0] + '.yaml')}\nlet: {{{let}}}\n"
                compiled = compile_layout(library, "megatron-local", mesh_text(mesh), source="megatron")
                self.assertEqual(compare(compiled, [renamed(each, "experts" in case[1]) for each in found])[:6], [])
                count += sum(len(each.params) for each in found)
        self.assertGreater(count, 200)
        print(f"{count} params")

    def test_inferred(self):
        for case in CASES:
            with self.subTest(case=case[:5]):
                layout = recording.merge(recordings(*case)[1])
                self.assertEqual((layout.refused, layout.differences), ({}, []), layout.yaml)

    def test_flattened_ranges_are_refused(self):
        """As those of a distributed optimizer."""
        of = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), (0, 1, 2))
        of.flattened_range = slice(0, 4)
        self.assertRaisesRegex(Error, "w: found a flattened range of w", tensors_of_state, {"w": of})


if __name__ == "__main__":
    if MISSING:
        print(f"SKIPPED: {MISSING}", file=sys.stderr)
    unittest.main()

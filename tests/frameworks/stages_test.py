# SPDX-License-Identifier: Apache-2.0
"""vLLM's own model classes in pipeline stages: each stage has the params of the layout `vllm`, with the same names and
shapes. The classes are built on PyTorch's meta device, one stage after the other, with fake process groups.

    scripts/frameworks.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/frameworks/stages_test.py"""

import json
import sys
import tempfile
import types
import unittest
from pathlib import Path

import library
from commands import BIN
from layout_text import endpoints
from support import CASES

try:
    import torch
    import vllm.distributed.parallel_state as parallel_state
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    MISSING = ""
except ImportError as error:
    MISSING = f"{error}: run scripts/frameworks.sh and build/frameworks/env.sh"

#: What the models of seven layers have beside what support.py states.
MORE = {
    "llama3-8b": {},
    "qwen2.5-7b": {},
    "qwen3-0.6b": {},
    "qwen3-30b-a3b": {"mlp_only_layers": []},
    "mixtral-8x7b": {},
    "glm-4.5": {},
    "deepseek-v3": {"first_k_dense_replace": 2, "num_key_value_heads": 8},
    "gpt-oss-120b": {"layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"]},
    "nemotron-h-8b": {"hybrid_override_pattern": "M-M*M-M"},
}
CONFIGS = {
    name: CASES["qwen3-tied" if name == "qwen3-0.6b" else name][1] | {"num_hidden_layers": 7} | more
    for name, more in MORE.items()
}
#: Created on stages that do not use them (docs/library.md).
UNUSED = (
    "model.embed_tokens.weight",
    "model.embedding.weight",
    "model.norm.weight",
    "model.norm_f.weight",
    "lm_head.weight",
)
STAGES = (2, 3, 4)


def group(rank, size):
    """The attributes of a process group that the constructors read."""
    ranks = types.SimpleNamespace(rank=lambda: rank, size=lambda: size)
    return types.SimpleNamespace(
        rank_in_group=rank,
        world_size=size,
        is_first_rank=rank == 0,
        is_last_rank=rank == size - 1,
        rank=rank,
        local_rank=0,
        ranks=list(range(size)),
        device_group=ranks,
        cpu_group=ranks,
        unique_name="stand-in",
        device=torch.device("cpu"),
    )


def live(config, stage, stages):
    """{name: shape} of a stage."""
    for name in ("_WORLD", "_TP", "_DP", "_EP", "_PCP", "_DCP", "_EPLB"):
        if hasattr(parallel_state, name):
            setattr(parallel_state, name, group(0, 1))
    parallel_state._PP = group(stage, stages)
    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config), torch.device("meta"):
        return {name: list(param.shape) for name, param in initialize_model(config).named_parameters()}


@unittest.skipIf(MISSING, MISSING)
class Stages(unittest.TestCase):
    def test_names_and_shapes(self):
        count = 0
        for model, values in CONFIGS.items():
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "config.json").write_text(json.dumps(values))
                config = EngineArgs(
                    model=folder, skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16"
                ).create_engine_config()
                pools = ", ".join(f"{{layout: vllm, mesh: {{pp: {stages}}}}}" for stages in STAGES)
                plan = endpoints(
                    BIN,
                    library.job(model, "{layout: hf, mesh: {}}", f"[{pools}]"),
                    folder,
                    [f"model.config={folder}/config.json"],
                )
                for number, stages in enumerate(STAGES):
                    for stage in range(stages):
                        with self.subTest(model=model, stages=stages, stage=stage):
                            found = live(config, stage, stages)
                            wanted = {
                                name: shape for name, (shape, _) in plan[f"target.{number}"].params(stage).items()
                            }
                            self.assertEqual(sorted(set(wanted) - set(found))[:4], [], "vLLM lacks these")
                            other = [name for name in found if name not in wanted and name not in UNUSED]
                            self.assertEqual(other[:4], [], "the layout lacks these")
                            self.assertEqual({name: found[name] for name in wanted if found[name] != wanted[name]}, {})
                            count += len(wanted)
        self.assertGreater(count, 1000)
        print(f"{count} params of {len(CONFIGS)} models")


if __name__ == "__main__":
    if MISSING:
        print(f"SKIPPED: {MISSING}", file=sys.stderr)
    unittest.main()

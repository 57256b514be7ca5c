# SPDX-License-Identifier: Apache-2.0
"""Writes tests/library/listings/transformers5 for the models that have routed experts or other names in the installed
version of transformers: the params and buffers of a live module (on the meta device) and its saved config.json. Run
it by hand, once for each release:

    . build/frameworks/env.sh && . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/frameworks/listings.py
"""

import re
import sys

import torch
import transformers

import support

FOLDER = support.ROOT / "tests" / "library" / "listings" / "transformers5"
MODELS = [
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "glm-4.5",
    "mixtral-8x7b",
    "deepseek-v3",
    "kimi-k2",
    "gpt-oss-120b",
    "nemotron-h-8b",
    "qwen3-next-80b-a3b",
    "qwen3.5-9b",
    "qwen3.5-35b-a3b",
    "qwen3-vl-30b-a3b",
    "nemotron-3-nano-30b-a3b",
    "kimi-linear-48b-a3b",
    "minimax-m2",
    "deepseek-v3.2",
    "glm-5",
]


def ranges(values):
    """{0..3,5} of sorted numbers."""
    parts = []
    for value in values:
        if parts and parts[-1][1] == value - 1:
            parts[-1][1] = value
        else:
            parts.append([value, value])
    return "{%s}" % ",".join(str(a) if a == b else f"{a}..{b}" for a, b in parts)


def main():
    assert transformers.__version__.startswith("5."), transformers.__version__
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or MODELS:
        config = support.config(name, support.MODELS / f"{name}.config.json")
        (FOLDER / f"{name}.config.json").write_text(config.to_json_string())
        module = support.live(config)
        found = {}
        for tensor, value in [
            *module.named_parameters(),
            *((n, b) for n, b in module.named_buffers() if "rotary_" not in n),
        ]:
            layer = re.search(r"\.(layers|blocks|deepstack_merger_list)\.(\d+)\.", tensor)
            pattern = tensor.replace(layer[0], f".{layer[1]}.*.") if layer else tensor
            found.setdefault((pattern, tuple(value.shape), value.dtype), []).append(int(layer[2]) if layer else None)
        lines = [
            f"# origin: transformers {transformers.__version__}, {type(module).__name__} on the meta device in "
            f"bf16, config {name}.config.json:",
            "# named_parameters() and, of named_buffers(), the router's",
        ]
        for (pattern, shape, dtype), layers in found.items():
            full = pattern.replace("*", ranges(layers)) if layers[0] is not None else pattern
            lines.append(f"{full}  {list(shape)}{'' if dtype == torch.bfloat16 else ' fp32'}")
            assert dtype in (torch.bfloat16, torch.float32), dtype
        (FOLDER / f"{name}.txt").write_text("\n".join(lines) + "\n")
        print(name, len(found))


if __name__ == "__main__":
    sys.exit(main())

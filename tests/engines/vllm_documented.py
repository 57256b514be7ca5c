# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of docs/integrations.md for vLLM in a folder with a checkpoint A and B: vllm_documented.py FOLDER.
The only step of the first sets the weights of B. The second, in vLLM's own vocabulary, refits the engine to A. Writes
what the engine generates after each, and what fresh engines of A and B generate, as JSON."""

import json
import sys
from pathlib import Path

FOLDER = Path(sys.argv[1])
sys.path.insert(0, str(FOLDER / "module"))

import torch  # noqa: E402
from documents import examples  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from vllm_engines import OPTIONS, engine, generated, shut_down  # noqa: E402


def programs():
    """The code of each program, with the folders of this test."""
    at = FOLDER / "qwen3-8b"
    for number, code in enumerate(examples("vLLM", "python")):
        (FOLDER / f"store{number}").mkdir()
        code = code.replace("file:///shared/refit", f"file://{FOLDER}/store{number}").replace('"checkpoint"', f'"{at}/A"')
        yield code.replace('"refit.', f'"{at}/refit.').replace('"model.yaml"', f'"{at}/model.yaml"')


def main():
    from transformers import AutoModelForCausalLM

    at = FOLDER / "qwen3-8b"
    (at / "refit.yaml").write_text("version: 1\nmodel: model.yaml\nsource: {layout: fsdp2, mesh: {}}\ntarget: {layout: vllm, mesh: {}, ranks: [1]}\n")
    module = AutoModelForCausalLM.from_pretrained(at / "A", dtype=torch.bfloat16)
    names = {"module": module, "options": OPTIONS, "batches": [at / "B"],
             "step": lambda module, batch: module.load_state_dict(load_file(batch / "model.safetensors"))}
    first, second = programs()
    exec(first, names)
    result = {"refitted": generated(names["llm"])}
    names["trainer"].close()
    names["step"](module, at / "A")
    exec(second, names)
    result["refitted by vLLM's factory"] = generated(names["llm"])
    names["trainer"].shutdown()
    shut_down(names["llm"])
    for name in "AB":
        fresh = engine(at / name)
        result[name] = generated(fresh)
        shut_down(fresh)
    (FOLDER / "documented.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

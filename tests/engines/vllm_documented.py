# SPDX-License-Identifier: Apache-2.0
"""Runs the second program of docs/integrations.md for vLLM, in vLLM's own vocabulary, in a folder with a checkpoint A
and B: vllm_documented.py FOLDER. An engine that has loaded B is refitted to A. Writes the weights and what is generated
then, and those of a fresh engine of A, as JSON."""

import json
import sys
from pathlib import Path

import torch

from documents import examples
from vllm_engines import engine, generated, shut_down, weights

FOLDER = Path(sys.argv[1])


def main():
    from transformers import AutoModelForCausalLM

    at = FOLDER / "qwen3-8b"
    (FOLDER / "store").mkdir()
    code = examples("vLLM", "python")[1].replace("file:///shared/refit", f"file://{FOLDER}/store")
    names = {"module": AutoModelForCausalLM.from_pretrained(at / "A", dtype=torch.bfloat16), "llm": engine(at / "B")}
    result = {"B": generated(names["llm"])}
    exec(code.replace('"refit.', f'"{at}/refit.').replace('"model.yaml"', f'"{at}/model.yaml"'), names)
    result |= {"refitted": generated(names["llm"]), "refitted weights": weights(names["llm"])}
    names["trainer"].shutdown()
    shut_down(names["llm"])
    fresh = engine(at / "A")
    result |= {"A": generated(fresh), "A weights": weights(fresh)}
    shut_down(fresh)
    (FOLDER / "documented.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

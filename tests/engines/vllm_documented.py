# SPDX-License-Identifier: Apache-2.0
"""Runs the program of docs/integrations.md for vLLM in a folder with a checkpoint A and B: vllm_documented.py FOLDER. Its
only step sets the weights of B. Then the trainer factory of vLLM refits the engine to A. Writes what the engine generates
after each, and what fresh engines of A and B generate, as JSON."""

import json
import sys
from pathlib import Path

FOLDER = Path(sys.argv[1])
sys.path.insert(0, str(FOLDER / "module"))

import torch  # noqa: E402
from documents import example  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from vllm_engines import OPTIONS, engine, generated, shut_down  # noqa: E402


def program():
    """The code, with the folders of this test."""
    at = FOLDER / "qwen3-8b"
    code = example("vLLM", "python").replace("file:///shared/refit", f"file://{FOLDER}/store")
    return code.replace('"checkpoint"', f'"{at}/A"').replace('"refit.', f'"{at}/refit.')


def refit_by_factory(module, llm, plan):
    """The same by vLLM's own interface for trainers."""
    from reshard.integrations.vllm_engine import TrainerInfo
    from reshard.integrations.vllm_trainer import LLMClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    (FOLDER / "factory").mkdir()
    info = TrainerInfo(plan, f"file://{FOLDER}/factory", module, rank=0)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=LLMClient(llm))
    trainer.send_weights()
    trainer.shutdown()


def main():
    from transformers import AutoModelForCausalLM

    at = FOLDER / "qwen3-8b"
    (FOLDER / "store").mkdir()
    (at / "refit.yaml").write_text("version: 1\nmodel: model.yaml\nsource: {layout: fsdp2, mesh: {}}\ntarget: {layout: vllm, mesh: {}, ranks: [1]}\n")
    module = AutoModelForCausalLM.from_pretrained(at / "A", dtype=torch.bfloat16)
    names = {"module": module, "options": OPTIONS, "batches": [at / "B"],
             "step": lambda module, batch: module.load_state_dict(load_file(batch / "model.safetensors"))}
    exec(program(), names)
    result = {"refitted": generated(names["llm"])}
    names["trainer"].close()
    names["step"](module, at / "A")
    refit_by_factory(module, names["llm"], names["plan"].path)
    result["refitted by factory"] = generated(names["llm"])
    shut_down(names["llm"])
    for name in "AB":
        fresh = engine(at / name)
        result[name] = generated(fresh)
        shut_down(fresh)
    (FOLDER / "documented.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

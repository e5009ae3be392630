"""The seconds that an engine step takes on the host, measured with engines of tiny models.

`python -m megarl.planning.engine_cost NUM_LAYERS DTYPE` prints the seconds of a step that draws one sample, and of a
step that draws many. Their products of matrices take no time to speak of.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from megarl.planning.machine import EngineCost
from megarl.platform.errors import UserError
from megarl.platform.imports import silence_imports

LAYERS = (1, 17)
SAMPLES = (1, 128)
TOKENS = (8, 40)  # of a response; the difference leaves out the prompt
REPEATS = 5
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}  # vLLM reads them
TINY: dict[str, object] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def measure(dtype: str) -> EngineCost:
    """Measure two engines of different depth, in a process each. Raises UserError if one fails."""
    return from_seconds(*(_step_seconds(num_layers, dtype) for num_layers in LAYERS))


def from_seconds(shallow: Sequence[float], deep: Sequence[float]) -> EngineCost:
    """Return the cost from the seconds of a step: each has those of the numbers of samples in `SAMPLES`."""
    (few, many), (few_layers, more_layers) = SAMPLES, LAYERS
    layer = max(0.0, (deep[0] - shallow[0]) / (more_layers - few_layers))
    sample = max(0.0, (shallow[1] - shallow[0]) / (many - few))
    return EngineCost(step=max(0.0, shallow[0] - few_layers * layer - few * sample), layer=layer, sample=sample)


def _step_seconds(num_layers: int, dtype: str) -> list[float]:
    command = [sys.executable, "-m", "megarl.planning.engine_cost", str(num_layers), dtype]
    done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", env=os.environ | ALONE, check=False)
    if done.returncode:
        raise UserError(f"{' '.join(command[1:])} failed with exit code {done.returncode}; its messages are above")
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def main(num_layers: int, dtype: Any) -> None:
    """Measure one engine."""
    from megarl.batch import Prompt
    from megarl.distributed.exchange import join_world
    from megarl.models.architecture import read_architecture
    from megarl.rollout.config import RolloutSection
    from megarl.rollout.engine import RolloutEngine

    config = TINY | {"num_hidden_layers": num_layers}
    section = RolloutSection(dtype=dtype, max_num_seqs=max(SAMPLES))
    prompts = [
        Prompt(index=number, token_ids=[3, 4, 5], text="", data_source="", ground_truth=None, extra_info={})
        for number in range(max(SAMPLES))
    ]
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as name:
        (Path(name) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        join_world(timeout=timedelta(minutes=5), init_method=f"file://{name}/store", rank=0, world_size=1)
        engine = RolloutEngine(
            section,
            model_dir=Path(name),
            architecture=read_architecture(config),
            stop_token_ids=[],
            max_model_len=64,
        )

        def seconds(num_samples: int, num_tokens: int) -> float:
            found = []
            for step in range(REPEATS + 1):  # the first is the warm-up
                start = time.perf_counter()
                engine.generate(prompts[:num_samples], section, max_tokens=num_tokens, step=step, log_probs=True)
                found.append(time.perf_counter() - start)
            return median(found[1:])

        with engine.receive_weights() as weights:
            for param in dict.fromkeys(piece.param for piece in weights.layout()):
                weights.open(param).zero_()
                weights.close(param)
        with engine.generating():
            few, many = TOKENS
            of_step = [(seconds(size, many) - seconds(size, few)) / (many - few) for size in SAMPLES]
        engine.close()
    print(json.dumps(of_step))


if __name__ == "__main__":
    silence_imports()
    main(int(sys.argv[1]), sys.argv[2])

"""Notice of each response as soon as it is finished."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megarl.platform.patching import replaced
from megarl.rollout.patches.releases import declare_vllm

ENGINE_STEP = declare_vllm(
    "vllm.v1.engine.llm_engine:LLMEngine",
    "step",
    reason="`LLM.generate` returns when the last request is finished, and has no callback",
    upstream="vllm/entrypoints/llm.py: LLM.generate",
    until="`LLM.generate` takes a callback for finished requests",
)


@contextmanager
def outputs_told(llm: Any, tell: Callable[[int, Any], None]) -> Iterator[None]:
    """Call `tell` with the number of each request of `llm.generate` and its output, as soon as it is finished.

    A counter of vLLM names the requests.
    """
    engine, first = llm.llm_engine, llm.request_counter.counter
    step = engine.step

    def telling_step() -> Any:
        outputs = step()
        for output in outputs:
            if output.finished:
                tell(int(output.request_id) - first, output)
        return outputs

    with replaced(ENGINE_STEP, on=engine, step=telling_step):
        yield

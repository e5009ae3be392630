"""vLLM in the trainer's own processes: one engine replica per `tensor_model_parallel_size` neighbouring ranks.

All ranks of a replica run the same requests in lockstep, each on its shard of the weights. Replicas are independent of
each other. The engine starts without weights and receives them by a sync before each generation.
Invariant: no token is generated from weights or cached keys of an earlier sync.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from megarl.batch import Prompt
from megarl.distributed.exchange import together
from megarl.rollout import patches, segments
from megarl.rollout.arguments import cache_argument, is_eager, llm_arguments
from megarl.rollout.config import RolloutSection
from megarl.rollout.kv_cache import check_cache_tokens
from megarl.rollout.sampling import Generation, Sampling, read_output, request_params, request_seed

if TYPE_CHECKING:
    from megarl.rollout.destination import EngineWeights

T = TypeVar("T")

KEYS = (  # for readers of a vLLM message that advises to change them
    "vLLM's gpu_memory_utilization, max_num_seqs and max_num_batched_tokens are keys of actor_rollout_ref.rollout; its "
    "max_model_len is data.max_prompt_length and data.max_response_length together"
)
MOST_NAMED = 8  # rows of the data set


class RolloutEngine:
    """This rank's part of one engine replica.

    Collective over the default process group, which must exist already; the launcher's RANK and LOCAL_RANK must be in
    the environment.
    """

    weights: "EngineWeights"
    """This rank's share of the engine's weights, the destination of a sync."""

    def __init__(
        self,
        section: RolloutSection,
        *,
        model_dir: Path,
        shapes: Mapping[str, tuple[int, ...]],
        num_key_value_heads: int,
        stop_token_ids: Sequence[int],
        max_model_len: int,
        max_sequences: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Start the engine, asleep.

        `model_dir` holds at least config.json; `shapes` are the full shapes of its Hugging Face parameters.
        `max_model_len` limits prompt and response together, in tokens. `max_sequences` is the most samples that one
        `generate` requests from a replica; on CPU it limits the KV cache.

        Raises:
            ValueError: sizes do not fit, or the KV cache does not hold one sequence of `max_model_len`.
        """
        self.tp_size = _divisor(section.tensor_model_parallel_size)
        patches.prepare_environment()
        # vLLM reads its environment when it is imported: nothing that imports it may come before this line.
        from vllm.platforms import current_platform

        from megarl.rollout import reload
        from megarl.rollout.destination import EngineWeights
        from megarl.rollout.layout import trace

        reload.check_version()
        reload.check_platform()
        patches.name_message_queues(prefix := segments.claim())
        self._section, self._stop, self.max_model_len = section, list(stop_token_ids), max_model_len
        on_cpu: bool = current_platform.is_cpu()
        self._version = 0
        self._may_compile = not (on_cpu and is_eager(section, on_cpu=on_cpu))
        arguments = llm_arguments(
            section,
            model_dir=model_dir,
            max_model_len=max_model_len,
            trust_remote_code=trust_remote_code,
            on_cpu=on_cpu,
        )
        if on_cpu:
            patches.name_channels(prefix if segments.may_spin() else None)
            patches.rotate_heads_correctly()
            sequences = min(section.max_num_seqs, max_sequences or section.max_num_seqs)
            cache = cache_argument(section, shapes, num_key_value_heads, sequences, max_model_len)
            arguments = cache | arguments
        if not gc.get_freeze_count():
            gc.freeze()  # vLLM collects garbage several times as it starts, each time among everything ever imported
        with self._compilation():
            self._llm = _start(arguments)
        blocks = self._llm.llm_engine.vllm_config.cache_config
        check_cache_tokens((blocks.num_gpu_blocks - 1) * blocks.block_size, max_model_len)  # vLLM keeps one block
        worker: Any = self._llm.collective_rpc(lambda worker: worker)[0]
        model = worker.get_model()
        self.weights = EngineWeights(model, trace(model, shapes, worker.device), vllm_config=worker.vllm_config)
        self._sleep()

    @property
    def num_replicas(self) -> int:
        """The number of independent copies of the engine in this job."""
        return dist.get_world_size() // self.tp_size

    @property
    def replica(self) -> int:
        """The replica that this rank belongs to."""
        return dist.get_rank() // self.tp_size

    @property
    def tp_rank(self) -> int:
        """This rank's position in its replica."""
        return dist.get_rank() % self.tp_size

    @contextmanager
    def awake(self, sync: Callable[["EngineWeights"], None], *, version: int = 0) -> Iterator["RolloutEngine"]:
        """Take memory, let `sync` write all weights, allow generation in the block, then return the memory.

        `version` is the number of finished steps that the weights come from.

        Memory is taken in the order of need, weights before KV cache, so that the trainer can still hold its own
        weights during the sync. After an error within the block the engine stays as it is: the run is over, and putting
        a broken engine to sleep could hide the cause.

        Raises:
            RuntimeError: the sync left a parameter unwritten, or vLLM kept keys of the old weights.
        """
        self._wake("weights")
        with self.weights.update():
            sync(self.weights)
        self._version = version
        self._wake("kv_cache")
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not drop keys cached under the old weights: a request is still running")
        yield self
        self._sleep()

    def on_all_ranks(self, generate: Callable[[], T]) -> list[T]:
        """Return what `generate` returns on each replica, in their order, on every rank. Collective.

        If every replica is one rank, an error is raised on all ranks, as by `together`. In a larger replica, the other
        ranks may wait for the failed rank in a collective of vLLM, and no message reaches them there. The failed rank
        then raises its error at once, which ends the job.
        """
        if self.tp_size == 1:
            return together(generate)
        mine = generate()
        return together(lambda: mine if self.tp_rank == 0 else None)[:: self.tp_size]  # type: ignore[return-value]

    def name(self, replica: int) -> str:
        """Return the name of a replica and its ranks, for messages."""
        first, size = replica * self.tp_size, self.tp_size
        return f"engine replica {replica} ({f'ranks {first}-{first + size - 1}' if size > 1 else f'rank {first}'})"

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        max_tokens: int,
        step: int,
        first_sample: int = 0,
        log_probs: bool | None = None,
        finished: Callable[[Generation], None] | None = None,
    ) -> list[Generation]:
        """Draw `sampling.n` samples of each of this replica's `prompts`. Collective over the ranks of the replica.

        A request's seed follows from the section's seed, `step`, the prompt's index and the sample's number.

        `first_sample` is the number of each prompt's first sample. `log_probs` None returns log-probabilities if the
        trainer can compute the same. `finished` receives each sample as soon as it is finished, on one rank of the
        replica, and must not raise. Returns the samples prompt by prompt, sample by sample.

        Raises:
            ValueError: a prompt leaves no room for `max_tokens`.
            RuntimeError: vLLM failed, or returned other samples than it was asked for; names replica and prompts.
        """
        _check_lengths(prompts, max_tokens, self.max_model_len)
        asked = [(position, sample) for position in range(len(prompts)) for sample in range(sampling.n)]
        section, index_of = self._section, [prompt.index for prompt in prompts]
        request = partial(
            request_params,
            sampling,
            max_tokens=max_tokens,
            stop=() if section.ignore_eos else self._stop,
            log_probs=section.compares if log_probs is None else log_probs,
        )
        seed = partial(request_seed, section.seed, step=step)
        params = [
            request(seed=seed(prompt_index=index_of[position], sample=first_sample + sample))
            for position, sample in asked
        ]
        requests = [{"prompt_token_ids": list(prompts[position].token_ids)} for position, _ in asked]

        def read(number: int, output: Any) -> Generation:
            position, _ = asked[number]
            return read_output(output, position=position, prompt=prompts[position], weight_version=self._version)

        def tell(number: int, output: Any) -> None:
            if finished and number % self.tp_size == self.tp_rank:
                finished(read(number, output))

        first = self._llm.request_counter.counter
        try:
            with patches.random_state_kept(), self._compilation(), patches.outputs_told(self._llm, tell):
                outputs = self._llm.generate(requests, params, use_tqdm=False)
            numbers = [int(output.request_id) - first for output in outputs]  # others are left from an earlier call
            if numbers != list(range(len(asked))):
                raise RuntimeError(
                    f"it returned {len(outputs)} samples of {len(asked)}, or others than it was asked for"
                )
            return [read(number, output) for number, output in enumerate(outputs)]
        except Exception as error:
            raise RuntimeError(failure(error, self.name(self.replica), index_of, step=step)) from error

    def close(self) -> None:
        """Shut the engine down, while the process groups it uses still exist."""
        from vllm.distributed.parallel_state import destroy_model_parallel

        self._llm.llm_engine.engine_core.shutdown()
        destroy_model_parallel()

    def _compilation(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._may_compile else patches.without_compilation()

    def _wake(self, tag: str) -> None:
        if self._section.free_cache_engine:
            self._llm.wake_up(tags=[tag])

    def _sleep(self) -> None:
        if self._section.free_cache_engine:
            self._llm.sleep(level=2)  # level 1 would keep weights on the host that the next sync replaces anyway


def failure(error: Exception, name: str, rows: Sequence[int], *, step: int) -> str:
    """Describe a failed generation: the engine, the step, the rows of the data set, the error and a remedy."""
    named = ", ".join(map(str, rows[:MOST_NAMED])) + (" ..." if len(rows) > MOST_NAMED else "")
    remedy = (
        " Lower actor_rollout_ref.rollout.gpu_memory_utilization, max_num_seqs or max_num_batched_tokens."
        if isinstance(error, torch.OutOfMemoryError)
        else ""
    )
    return (
        f"{name} failed after {step} finished steps, asked for responses to rows {named}: "
        f"{type(error).__name__}: {error}. Nothing that it generated is used.{remedy}"
    )


def _start(arguments: dict[str, Any]) -> Any:
    from vllm import LLM

    try:
        with patches.start_isolated():
            return LLM(**arguments)
    except ValueError as error:
        raise ValueError(f"vLLM does not start on rank {dist.get_rank()}: {error} ({KEYS})") from error


def _check_lengths(prompts: Sequence[Prompt], max_tokens: int, max_model_len: int) -> None:
    for prompt in prompts:
        if len(prompt.token_ids) + max_tokens > max_model_len:
            raise ValueError(
                f"Prompt {prompt.index} has {len(prompt.token_ids)} tokens and its response may have {max_tokens}, "
                f"but the engine was started for {max_model_len} together; raise data.max_prompt_length"
            )


def _divisor(tp_size: int) -> int:
    if dist.get_world_size() % tp_size:
        raise ValueError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={tp_size} does not divide the "
            f"{dist.get_world_size()} processes of this job; choose a divisor"
        )
    return tp_size

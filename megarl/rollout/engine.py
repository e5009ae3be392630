"""vLLM in the trainer's own processes: one engine replica per `tensor_model_parallel_size` neighbouring ranks.

All ranks of a replica run the same requests in lockstep, each on its shard of the weights; replicas know nothing of
each other. The engine starts without weights and is given them by a sync before each generation.
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
from megarl.rollout.config import RolloutSection
from megarl.rollout.fields import OURS, engine_faults
from megarl.rollout.kv_cache import cache_bytes_per_token, check_cache_tokens, cpu_cache_bytes
from megarl.rollout.sampling import Generation, Sampling, read_output, request_params, request_seed

if TYPE_CHECKING:
    from megarl.rollout.destination import EngineWeights

T = TypeVar("T")

KEYS = (  # for whom a message of vLLM tells to change them
    "vLLM's gpu_memory_utilization, max_num_seqs and max_num_batched_tokens are keys of actor_rollout_ref.rollout; its "
    "max_model_len is data.max_prompt_length and data.max_response_length together"
)
MOST_NAMED = 8  # rows of the data set


class RolloutEngine:
    """This rank's part of one engine replica.

    Collective over the default process group, which must exist already; the launcher's RANK and LOCAL_RANK must be in
    the environment.
    """

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
        `max_model_len` bounds prompt and response together, in tokens. `max_sequences` is the most samples that one
        `generate` will ask of a replica; on CPU it bounds the KV cache. ValueError for sizes that do not fit, or where
        the KV cache does not hold one sequence of `max_model_len`.
        """
        self.tp_size = _divisor(section.tensor_model_parallel_size)
        patches.prepare_environment()
        # vLLM reads its environment when it is imported: nothing that imports it may come before this line.
        from vllm.platforms import current_platform

        from megarl.rollout import reload
        from megarl.rollout.destination import EngineWeights
        from megarl.rollout.layout import trace

        reload.check_version()
        patches.name_message_queues(prefix := segments.claim())
        self._section, self._stop, self.max_model_len = section, list(stop_token_ids), max_model_len
        on_cpu: bool = current_platform.is_cpu()
        self._version = 0
        self._may_compile = not (on_cpu and section.enforce_eager)
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
            cache_bytes = cpu_cache_bytes(
                section,
                cache_bytes_per_token(section, shapes, num_key_value_heads=num_key_value_heads),
                num_sequences=min(section.max_num_seqs, max_sequences or section.max_num_seqs),
                max_model_len=max_model_len,
            )
            arguments = {"kv_cache_memory_bytes": cache_bytes} | arguments
        if not gc.get_freeze_count():
            gc.freeze()  # starting, vLLM collects garbage several times, each time among all that was ever imported
        self._llm = self._start(arguments)
        cache = self._llm.llm_engine.vllm_config.cache_config
        check_cache_tokens((cache.num_gpu_blocks - 1) * cache.block_size, max_model_len)  # vLLM keeps a block to itself
        worker: Any = self._llm.collective_rpc(lambda worker: worker)[0]
        model = worker.get_model()
        self._weights = EngineWeights(model, trace(model, shapes, worker.device), vllm_config=worker.vllm_config)
        self._sleep()

    @property
    def num_replicas(self) -> int:
        """Independent copies of the engine in this job."""
        return dist.get_world_size() // self.tp_size

    @property
    def replica(self) -> int:
        """The copy that this rank belongs to."""
        return dist.get_rank() // self.tp_size

    @property
    def tp_rank(self) -> int:
        """This rank's place in its copy."""
        return dist.get_rank() % self.tp_size

    @property
    def weights(self) -> "EngineWeights":
        """What this rank needs of the actor's weights."""
        return self._weights

    @contextmanager
    def awake(self, sync: Callable[["EngineWeights"], None], *, version: int = 0) -> Iterator["RolloutEngine"]:
        """Take memory, let `sync` write all weights, and generate within; then give the memory back.

        `version` names the weights: how many steps of the run are finished.

        Memory comes in the order it is needed, weights before KV cache, so that the trainer can still hold its own
        weights during the sync. RuntimeError where the sync left a parameter unwritten. After an error within the block
        the engine is left as it is: the run is over, and putting a broken engine to sleep could hide why.
        """
        self._wake("weights")
        with self._weights.update():
            sync(self._weights)
        self._version = version
        self._wake("kv_cache")
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not drop keys cached under the old weights: a request is still running")
        yield self
        self._sleep()

    def on_all_ranks(self, generate: Callable[[], T]) -> list[T]:
        """What `generate` gives on each replica, in their order, on every rank; all ranks must call this.

        An error reaches all ranks as by `together` where a replica is one rank. Of several, those that did not fail may
        wait for the one that did in a collective of vLLM, where nothing reaches them: it leaves with its error at once,
        and the job ends with it.
        """
        if self.tp_size == 1:
            return together(generate)
        mine = generate()
        return together(lambda: mine if self.tp_rank == 0 else None)[:: self.tp_size]  # type: ignore[return-value]

    def name(self, replica: int) -> str:
        """A replica and its ranks, for people."""
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
        """Draw `sampling.n` samples of each of this replica's `prompts`; all ranks of the replica must call it alike.

        Returns them prompt by prompt, sample by sample. A request's seed follows from the section's seed, `step`, the
        prompt's index and the sample's number, counted from `first_sample`. `log_probs` None asks for them where the
        trainer can compute the same. `finished` is told of each sample as soon as it is there, on one rank of the
        replica, and must not raise.

        Raises:
            ValueError: a prompt leaves no room for `max_tokens`.
            RuntimeError: vLLM failed, or did not answer exactly what it was asked; names replica and prompts.
        """
        self._check_lengths(prompts, max_tokens)
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
            numbers = [int(output.request_id) - first for output in outputs]  # another one is left from an earlier call
            if numbers != list(range(len(asked))):
                raise RuntimeError(
                    f"it returned {len(outputs)} samples of {len(asked)}, or others than it was asked for"
                )
            return [read(number, output) for number, output in enumerate(outputs)]
        except Exception as error:
            raise RuntimeError(failure(error, self.name(self.replica), index_of, step=step)) from error

    def _check_lengths(self, prompts: Sequence[Prompt], max_tokens: int) -> None:
        for prompt in prompts:
            if len(prompt.token_ids) + max_tokens > self.max_model_len:
                raise ValueError(
                    f"Prompt {prompt.index} has {len(prompt.token_ids)} tokens and its response may have {max_tokens}, "
                    f"but the engine was started for {self.max_model_len} together; raise data.max_prompt_length"
                )

    def close(self) -> None:
        """Shut the engine down, while the process groups it uses still exist."""
        from vllm.distributed.parallel_state import destroy_model_parallel

        self._llm.llm_engine.engine_core.shutdown()
        destroy_model_parallel()

    def _start(self, arguments: dict[str, Any]) -> Any:
        from vllm import LLM

        try:
            with patches.start_isolated(), self._compilation():
                return LLM(**arguments)
        except ValueError as error:
            raise ValueError(f"vLLM does not start on rank {dist.get_rank()}: {error} ({KEYS})") from error

    def _compilation(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._may_compile else patches.without_compilation()

    def _wake(self, tag: str) -> None:
        if self._section.free_cache_engine:
            self._llm.wake_up(tags=[tag])

    def _sleep(self) -> None:
        if self._section.free_cache_engine:
            self._llm.sleep(level=2)  # level 1 would keep weights on the host that the next sync replaces anyway


def failure(error: Exception, name: str, rows: Sequence[int], *, step: int) -> str:
    """Which engine failed, when, on which rows of the data set, with what, and what may help."""
    named = ", ".join(map(str, rows[:MOST_NAMED])) + (" ..." if len(rows) > MOST_NAMED else "")
    remedy = (
        " Lower actor_rollout_ref.rollout.gpu_memory_utilization, max_num_seqs or max_num_batched_tokens."
        if isinstance(error, torch.OutOfMemoryError)
        else ""
    )
    return (
        f"{name} failed after {step} finished steps, asked for answers to rows {named}: "
        f"{type(error).__name__}: {error}. Nothing that it generated is used.{remedy}"
    )


def llm_arguments(
    section: RolloutSection, *, model_dir: Path, max_model_len: int, trust_remote_code: bool, on_cpu: bool
) -> dict[str, Any]:
    """The arguments of `vllm.LLM`; ValueError for `engine_kwargs` that contradict them or that vLLM does not know."""
    ours: dict[str, Any] = {
        "model": str(model_dir),
        "trust_remote_code": trust_remote_code,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # our stop tokens and sampling, none of the checkpoint's
        "load_format": "auto" if section.load_format == "auto" else "dummy",
        "dtype": section.dtype,
        "seed": section.seed,
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": section.tensor_model_parallel_size,
        "max_model_len": max_model_len,
        "max_num_seqs": section.max_num_seqs,
        "max_num_batched_tokens": section.max_num_batched_tokens,
        "gpu_memory_utilization": section.gpu_memory_utilization,
        "enforce_eager": section.enforce_eager,
        "enable_prefix_caching": section.enable_prefix_caching,
        "enable_sleep_mode": section.free_cache_engine and not on_cpu,
        # The trainer computes the probabilities of all tokens: those after the temperature, unless top_p or top_k leave
        # tokens out, for the processed ones would then be of the remaining tokens alone.
        "logprobs_mode": "processed_logprobs" if section.draws_from_all else "raw_logprobs",
    }
    where = "actor_rollout_ref.rollout.engine_kwargs"
    if on_cpu and section.engine_kwargs.get("enable_expert_parallel"):
        raise ValueError(
            f"{where}: vLLM crashes where it computes with enable_expert_parallel on CPU; remove it, and every expert "
            "is cut over the ranks of a replica"
        )
    assert ours.keys() == OURS
    for fault in engine_faults(section.engine_kwargs):
        raise ValueError(f"{where}: {fault}")
    # vLLM 0.26 - 0.32 otherwise rounds logits to the model's type, the trainer does not (`megarl.learner.heads`).
    overrides = {"head_dtype": "float32"} | section.engine_kwargs.get("hf_overrides", {})
    return ours | section.engine_kwargs | {"hf_overrides": overrides}


def _divisor(tp_size: int) -> int:
    if dist.get_world_size() % tp_size:
        raise ValueError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={tp_size} does not divide the "
            f"{dist.get_world_size()} processes of this job; choose a divisor"
        )
    return tp_size

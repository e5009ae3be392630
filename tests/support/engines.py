"""A rollout engine on a tiny checkpoint, given weights straight from full Hugging Face tensors."""

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megarl.batch import Group, Prompt
from megarl.models.architecture import read_architecture
from megarl.models.engine import engine_layout
from megarl.reshard.layout import Layout
from megarl.rollout import patches, segments
from megarl.rollout.arguments import llm_arguments
from megarl.rollout.config import RolloutSection
from megarl.rollout.engine import RolloutEngine
from tests.support.layouts import slices
from tests.support.tiny import write_checkpoint


def prompt(index: int, token_ids: list[int]) -> Prompt:
    return Prompt(index=index, token_ids=token_ids, text="", data_source="", ground_truth=None, extra_info={})


# 130 shared tokens fill one block of the prefix cache, so a key that outlived a sync would be read.
PROMPTS = [
    prompt(10 * number, tokens)
    for number, tokens in enumerate(
        [[5, 9, 3], [7] * 40 + [8], [*range(3, 133), 40], [*range(3, 133), 41, 42], [11, 12], [13, 14, 15, 16]]
    )
]


def write_two_checkpoints(root: Path, variant: str, **overrides: Any) -> list[Path]:
    """Return two checkpoints with different weights and a directory that has only their config; write them once."""
    first, second, bare = (root / f"{variant}-{name}" for name in ("first", "second", "bare"))
    if not bare.exists():
        write_checkpoint(first, variant, seed=1, **overrides)
        write_checkpoint(second, variant, seed=3, **overrides)  # seed 2 has a router whose second and third expert tie
        bare.mkdir()
        shutil.copy(first / "config.json", bare)
    return [first, second, bare]


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    return load_file(checkpoint / "model.safetensors")


@contextmanager
def generating(engine: Any, tensors: dict[str, Tensor], *, version: int = 0) -> Iterator[None]:
    """Copy the pieces of the engine's layout from full tensors, and let it generate within the block."""
    with engine.receive_weights(version=version) as weights:
        pieces = defaultdict(list)
        for piece in weights.layout():
            pieces[piece.param].append(piece)
        for param, parts in pieces.items():
            target = weights.open(param)
            target.fill_(float("nan"))  # what a sync leaves out must show
            for part in parts:
                part.view(target).copy_(tensors[part.name][slices(part.box)])
            weights.close(param)
    with engine.generating():
        yield


def new_session(num_samples: int) -> list[Group]:
    """Return a group of samples of each prompt, without tokens."""
    return [Group.new(prompt, range(num_samples), started=0, place=place) for place, prompt in enumerate(PROMPTS)]


def draw(queue: Any, session: Sequence[Group], num_steps: int | None = None) -> list[Group]:
    """Draw the samples of a session for so many steps, or to the end. Those that are stopped keep their tokens."""
    queue.add(session)
    drawn = sorted([*queue.run(num_steps), *queue.stop()], key=lambda each: each.sample)
    return [
        replace(group, samples=tuple(each for each in drawn if each.prompt == place))
        for place, group in enumerate(session)
    ]


OWN = re.compile(r"\.experts\.|\.sinks$")


def index_valued(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of the same shapes whose elements all differ and are exact in float32."""
    starts = accumulate((tensor.numel() for tensor in tensors.values()), initial=1)
    valued = {
        name: torch.arange(first, first + tensor.numel(), dtype=torch.float32).view(tensor.shape)
        for (name, tensor), first in zip(tensors.items(), starts, strict=False)
    }
    assert sum(tensor.numel() for tensor in valued.values()) < 1 << 24
    return valued


def placed_by_vllm(llm: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the engine's parameters as vLLM's own reload fills them, before they are packed; spoil the engine."""
    from megarl.rollout import reload  # imports vLLM

    placed: dict[str, Tensor] = {}

    def note(name: str, module: Any) -> None:
        own = module.named_parameters(recurse=False)
        placed.update({f"{name}.{key}": tensor.detach().clone() for key, tensor in own})

    def note_before(name: str, pack: Callable[[Any], None]) -> Callable[[Any], None]:
        return lambda module: (note(name, module), pack(module))  # type: ignore[return-value]

    model = llm.collective_rpc(lambda worker: worker.get_model())[0]
    for parameter in model.parameters():
        if isinstance(getattr(parameter, "weight_loader", None), partial):
            parameter.weight_loader.__name__ = "weight_loader"  # vLLM asks every loader for its name
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading = note_before(name, method.process_weights_after_loading)
    # vLLM's reload of a router ends with its matrix, and would lose a bias behind it.
    biases_first = sorted(tensors.items(), key=lambda item: not item[0].endswith("correction_bias"))
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(biases_first)})
    for name, module in model.named_modules():
        if not hasattr(getattr(module, "quant_method", None), "process_weights_after_loading"):
            note(name, module)
    # vLLM's reload awaits calls of weight loaders, and gpt-oss copies experts and sinks without one.
    late = {
        name: module
        for name, module in model.named_modules()
        if "sinks" in reload.parameters(module)
        or (name.endswith(".routed_experts") and f"{name}.w13_weight" not in placed)
    }
    for module in late.values():
        reload.to_load_format(module, reload.loadable(module))
        reload.materialize(module)
    if late:
        model.load_weights([(name, tensor.clone()) for name, tensor in tensors.items() if OWN.search(name)])
    for name, module in late.items():
        note(name, module)
    return placed


def check_against_vllm(llm: Any, layout: Layout, tensors: dict[str, Tensor]) -> None:
    """Check that the layout and vLLM's own reload place every element alike; spoil the engine's weights."""
    numbered = index_valued(tensors)
    placed = placed_by_vllm(llm, numbered)
    expected = {piece.param: torch.zeros(placed[piece.param].numel()) for piece in layout}
    for piece in layout:
        piece.view(expected[piece.param]).copy_(numbered[piece.name][slices(piece.box)])
    for param, tensor in expected.items():
        assert torch.equal(tensor, placed[param].flatten()), param


def check_against_rules(layout: Layout, model_dir: Path, *, tp_size: int, **settings: Any) -> None:
    """Check that the layout equals the one that `megarl.models.engine` computes for this rank."""
    architecture = read_architecture(json.loads((model_dir / "config.json").read_text()))
    settings = {"expert_parallel": False, "dtype": torch.float32, "latent_fused": False} | settings
    rules = engine_layout(architecture, tp_rank=dist.get_rank() % tp_size, tp_size=tp_size, **settings)
    both = {str(piece) for piece in layout} & {str(piece) for piece in rules}
    only = [[str(piece) for piece in pieces if str(piece) not in both] for pieces in (layout, rules)]
    assert only == [[], []], "pieces of vLLM's loaders alone, and of the rules alone:\n" + "\n".join(sum(only, []))


def start(model_dir: Path, *, tp_size: int, max_model_len: int = 160, **settings: Any) -> RolloutEngine:
    section = RolloutSection(tensor_model_parallel_size=tp_size, **{"dtype": "float32", "max_num_seqs": 16} | settings)
    engine = RolloutEngine(
        section,
        model_dir=model_dir,
        architecture=read_architecture(json.loads((model_dir / "config.json").read_text())),
        stop_token_ids=[],
        max_model_len=max_model_len,
    )
    # On CUDA, vLLM's faster runner takes every model that it knows, unless the engine asks for more than it can do.
    assert engine._llm.llm_engine.vllm_config._get_v2_model_runner_unsupported_features() == []
    return engine


def load_as_published(model_dir: Path) -> Any:
    """Return a vLLM that loaded the weights of a directory itself."""
    from vllm import LLM

    section = RolloutSection(dtype="float32", max_num_seqs=16, load_format="auto")
    arguments = llm_arguments(section, model_dir=model_dir, max_model_len=160, trust_remote_code=False, on_cpu=True)
    with patches.start_isolated(), patches.compilation(allowed=False):
        return LLM(**arguments, kv_cache_memory_bytes=1 << 26)


def shared_memory_name() -> str:
    """Return the shared-memory segment of the replica's ranks; empty if they send messages."""
    from vllm.distributed import get_tp_group

    return getattr(get_tp_group().device_communicator.dist_module, "group_name", "")


def can_share_memory() -> bool:
    """Whether each of two ranks has a core, and vLLM has its channel in shared memory for this processor (AVX-512)."""
    return len(os.sched_getaffinity(0)) >= 2 and hasattr(torch.ops._C, "init_shm_manager")


def start_with_expert_parallel(model_dir: Path, *, tp_size: int) -> Any:
    """Return a vLLM as the engine starts it, with complete experts on every rank. On CPU it must not compute."""
    from vllm import LLM

    section = RolloutSection(tensor_model_parallel_size=tp_size, dtype="float32", max_num_seqs=16)
    arguments = llm_arguments(section, model_dir=model_dir, max_model_len=160, trust_remote_code=False, on_cpu=True)
    patches.mend_cpu_build(segments.claim() if segments.may_spin() else None)
    with patches.start_isolated(), patches.compilation(allowed=False):
        return LLM(**arguments, enable_expert_parallel=True, kv_cache_memory_bytes=1 << 26)


def tear_down(engine: RolloutEngine) -> None:
    """Close an engine so that another can start in this process, in another world."""
    tear_down_vllm(engine._llm)


def tear_down_vllm(llm: Any) -> None:
    """Shut an engine down. What its process was forked with stays frozen, so that no collection searches it."""
    with patches.frozen():
        llm.llm_engine.engine_core.shutdown()
    forget_parallel_state()


def forget_parallel_state() -> None:
    """Remove the state of vLLM from this process, also after an engine that failed."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    # vLLM numbers the groups of a process, and ranks of earlier worlds would not meet by name.
    parallel_state._group_name_counter.clear()


def log_probs(model: Any, prompt: Prompt, response: Sequence[int], temperature: float) -> Tensor:
    """Return the log-probability of each response token by `transformers`, [len(response)]."""
    tokens = torch.tensor([[*prompt.token_ids, *response]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(prompt.token_ids) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(list(response))[:, None])[:, 0]

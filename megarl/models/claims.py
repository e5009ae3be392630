"""A check that the tensors of a Hugging Face directory belong to the model that its `config.json` describes.

A tensor without a parameter is a fault: dropping it silently would leave another model than the trained one. The scales
of FP8 blocks and of MXFP4 belong to their matrices. Four kinds are left out on purpose: the frequencies of rotary
positions and the masks of old gpt_neox checkpoints, which are computed; the layers that predict several tokens ahead;
the layers behind an overridden num_hidden_layers; and the parts for images around a text model. `megarl.models.source`
checks the output layer of a model with tied embeddings, because its values decide.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megarl.models.architecture import Architecture, hf_shapes
from megarl.models.fields import Fields
from megarl.models.hub import read_config
from megarl.platform.errors import UserError
from megarl.reshard.headers import CONFIG, FLOATS, Stored, stored_tensors
from megarl.reshard.quantised import FP8, KEY, block_faults, block_of, matrix_of, not_plain, without_mxfp4
from megarl.reshard.wrapped import is_wrapped, text_places

MOST_NAMED = 3
COMPUTED = re.compile(r"(.+\.)?rotary_emb\.inv_freq|gpt_neox\.layers\.\d+\.attention\.(masked_)?bias")
LAYER = re.compile(r"\w+\.layers\.(\d+)\.")
CLAIMS = (
    (re.compile(r".*self_attn\.[qkvo]_proj\.bias"), "biases of the attention follow from attention_bias or qkv_bias"),
    (re.compile(r".*self_attn\.[qk]_norm\..*"), "norms of queries and keys follow from model_type qwen3"),
    (re.compile(r".*mlp\..*\.bias"), "biases of the feed-forward layer follow from mlp_bias"),
    (
        re.compile(r".*(experts?|experts_gate|expert_gate|\.gate)\..+"),
        "experts follow from model_type and the number of experts",
    ),
    (re.compile(r"score\..*"), "a score follows from architectures [...ForSequenceClassification]"),
    (re.compile(r"(lm_head|embed_out)\..*"), "an output layer follows from architectures [...ForCausalLM]"),
)
"""Patterns of tensors, and the fields of a `config.json` that they follow from; the first match counts."""


def weight_faults(directory: Path, architecture: Architecture, *, needs_head: bool) -> Iterator[str]:
    """Yield a sentence for each difference between the stored tensors and `architecture`. Reads only headers.

    Args:
        directory: a directory with weights and `config.json`.
        architecture: the model that `config.json` describes, overrides applied.
        needs_head: whether the output layer must be there.
    """
    try:
        stored = stored_tensors(directory)
        if is_wrapped(directory):
            stored = {name: place.tensor for name, place in text_places(stored).items()}
        own = Fields.of(read_config(directory, {}))
        num_layers = max(architecture.num_layers, own.size("num_hidden_layers", architecture.num_layers))
        num_ahead = own.size("num_nextn_predict_layers", own.size("num_mtp_modules", 0, least=0), least=0)
        declared = own.values.get(KEY)
        block = block_of(declared)
    except UserError as error:
        yield str(error)
        return
    if declared and not block:
        stored, faults = without_mxfp4(stored)
        yield from faults[:1]
    shapes = hf_shapes(replace(architecture, num_layers=num_layers))
    head = architecture.head_name
    needed = [name for name in hf_shapes(architecture) if needs_head or name != head]
    missing = [name for name in needed if name not in stored]
    if missing:
        hint = "; if its output layer is the embedding, config.json must say tie_word_embeddings: true"
        yield f"{directory} has no tensor {_listed(missing)}{hint * (head in missing)}"
    yield from _misfits(stored, shapes, [*FLOATS, FP8] if block else FLOATS)
    if block:
        yield from block_faults(stored, block)
        stored = {name: tensor for name, tensor in stored.items() if matrix_of(name) is None}
    ahead = range(num_layers, num_layers + num_ahead) if architecture.traits.predicts_ahead is True else range(0)
    unclaimed = [name for name in stored if name not in shapes and not _is_left_out(name, architecture, ahead)]
    if unclaimed:
        claims = dict.fromkeys(_who_claims(name, num_layers) for name in unclaimed)
        yield (
            f"{directory} holds {_listed(unclaimed)}, which the model of its {CONFIG} does not have, and which would "
            f"be dropped ({'; '.join(claims)}): correct {CONFIG}, or remove the tensors from the files"
        )


def _misfits(
    stored: Mapping[str, Stored], shapes: Mapping[str, tuple[int, ...]], dtypes: Collection[str]
) -> Iterator[str]:
    claimed = {name: tensor for name, tensor in stored.items() if name in shapes}
    others = [name for name, tensor in claimed.items() if tensor.shape != shapes[name]]
    if others:
        tensor = claimed[others[0]]
        more = f" (and {len(others) - 1} more tensors do not fit)" if len(others) > 1 else ""
        yield f"{others[0]} in {tensor.file} has shape {tensor.shape}; {CONFIG} says {shapes[others[0]]}{more}"
    for name, tensor in claimed.items():
        if tensor.dtype not in dtypes:
            yield f"{name} in {tensor.file} is stored as {tensor.dtype}; {not_plain()}"
            return


def _is_left_out(name: str, architecture: Architecture, ahead: range) -> bool:
    if name == architecture.head_name and architecture.tied_embeddings:
        return True
    prefix = architecture.traits.predicts_ahead
    if isinstance(prefix, str) and name.startswith(prefix):
        return True
    layer = LAYER.match(name)
    return bool(COMPUTED.fullmatch(name)) or bool(layer and int(layer[1]) in ahead)


def _who_claims(name: str, num_layers: int) -> str:
    layer = LAYER.match(name)
    if layer and int(layer[1]) >= num_layers:
        return f"num_hidden_layers counts {num_layers} layers"
    return next((claim for pattern, claim in CLAIMS if pattern.match(name)), "a layer's tensors follow from model_type")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more tensors" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more

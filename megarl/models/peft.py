"""The files of PEFT: a directory with adapters has their weights and `adapter_config.json`."""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from megarl.models.architecture import Architecture
from megarl.models.config import ALL_LINEAR, ModelSection
from megarl.models.hub import read_json
from megarl.models.lora import Lora, adapted_projections, require_targets
from megarl.platform.errors import UserError
from megarl.platform.files import write_whole
from megarl.platform.hub import SCHEME, repository
from megarl.reshard.headers import ADAPTERS
from megarl.reshard.headers import ADAPTERS_CONFIG as CONFIG

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {  # field: its supported values, first that of a missing field
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False,),
    "use_bdlora": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # others change the weights of the base
    "modules_to_save": (None, [], ["score"], ["classifier", "score"]),
}
HINT_FOR_EXPERTS = (
    "; PEFT has one adapter for all experts of a layer, megarl one for each: leave the experts out of target_modules"
)


def lora_of(section: ModelSection, architecture: Architecture) -> Lora | None:
    """Return the adapters that a section asks for, of a model; None if the weights learn.

    Raises:
        UserError: `lora_adapter_path` names no adapters, unsupported ones, or those of another rank; or what
            `require_targets` refuses.
    """
    if section.lora_adapter_path:
        directory = Path(section.lora_adapter_path)
        lora = replace(read_adapters(directory, base=section.path), dropout=section.lora_dropout, start=directory)
        if section.lora_rank not in (0, lora.rank):
            raise UserError(
                f"lora_rank={section.lora_rank}, but the adapters in {directory} have rank {lora.rank}: leave lora_rank"
                " out, or write this rank"
            )
    elif section.lora_rank:
        lora = Lora(
            rank=section.lora_rank,
            alpha=section.lora_alpha,
            targets=_names(section.target_modules),
            excluded=_names(section.exclude_modules),
            dropout=section.lora_dropout,
            base=base_name(section.path),
        )
    else:
        return None
    require_targets(architecture, lora)
    return lora


def base_name(path: str) -> str:
    """Return a path that does not depend on the working directory; a URI or an id stays as it is."""
    return str(Path(path).resolve()) if path and Path(path).exists() else path


def read_adapters(directory: Path, *, base: str | None = None) -> Lora:
    """Return the adapters that the `adapter_config.json` of a directory describes; `base` replaces that of the file.

    Raises:
        UserError: there is no such file, or a field asks for what megarl does not do.
    """
    path = directory / CONFIG
    if not path.is_file():
        raise UserError(f"{directory} has no {CONFIG}: name a directory that PEFT has written")
    config = read_json(path)
    for field, allowed in UNSUPPORTED.items():
        value = config.get(field, allowed[0])
        if value not in allowed:
            hint = HINT_FOR_EXPERTS if field == "target_parameters" else ""
            only = " or ".join(map(repr, allowed))
            raise UserError(f"{path}: {field}={value!r} is not supported, only {only}{hint}")
    rank = config.get("r")
    alpha = config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        raise UserError(f"{path}: r={rank!r}, lora_alpha={alpha!r}: adapters need a rank and a scale")
    if config.get("use_rslora"):  # divides by the root of the rank
        alpha *= math.sqrt(rank)
    return Lora(
        rank=rank,
        alpha=float(alpha),
        targets=_names(config.get("target_modules") or ALL_LINEAR),
        excluded=_names(config.get("exclude_modules")),
        dropout=float(config.get("lora_dropout") or 0.0),
        base=base_name(base or _base_of(config)),
    )


def _base_of(config: Mapping[str, Any]) -> str:
    """Return the model that an `adapter_config.json` names; '' if it names none."""
    name = str(config.get("base_model_name_or_path") or "")
    revision = config.get("revision")
    if not revision or Path(name).exists():
        return name
    return f"{SCHEME}{name}@{quote(revision, safe='')}"


def require_known(directory: Path, names: Collection[str], known: Collection[str]) -> None:
    """Raise UserError if a directory of PEFT has `names` that are not among the `known` parameters of a model."""
    unknown = sorted(set(names) - set(known))
    if unknown:
        hint = HINT_FOR_EXPERTS if any(".experts." in name for name in unknown) else ""
        raise UserError(
            f"{directory / ADAPTERS} has parameters that this model has no place for: {', '.join(unknown[:4])}{hint}"
        )


def write_adapter_config(directory: Path, lora: Lora, architecture: Architecture) -> None:
    """Write `adapter_config.json`."""
    write_whole(directory / CONFIG, json.dumps(adapter_config(lora, architecture), indent=2).encode())


def adapter_config(lora: Lora, architecture: Architecture) -> dict[str, object]:
    """Return the content of `adapter_config.json`."""
    scores = architecture.scalar_head
    base, revision = repository(lora.base)
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if scores else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": adapted_projections(architecture, lora),
        "modules_to_save": ["score"] if scores else None,
        "bias": "none",
        "inference_mode": True,
    }


def _names(value: str | list[str] | None) -> str | tuple[str, ...]:
    return value if isinstance(value, str) else tuple(value or ())

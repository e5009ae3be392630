"""The model card of an exported model: its origin, its training, its scores, and the lines that load it."""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import yaml

from megarl.checkpoint.contents import Contents, RunConfig
from megarl.data.origins import hub_datasets
from megarl.models.lora import Lora
from megarl.platform.hub import CARD_FILE, downloaded, repository
from megarl.platform.uri import local_path
from megarl.tracking.names import LEARNT, REWARD, validation_of
from megarl.tracking.protocol import Row

LICENSE = ("license", "license_name", "license_link")
"""The fields of a card that state the licence: its id, and with the id `other` its name and address."""
RANKS_OF_VLLM = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's option --max-lora-rank."""


def card(
    contents: Contents,
    history: Sequence[Row],
    place: Path | str,
    *,
    scores: bool,
    adapters: Lora | None = None,
    license_id: str | None = None,
) -> str:
    """Return the text of the card.

    Args:
        contents: the small files of the checkpoint.
        history: the metrics of the run.
        place: the directory of the exported model, or the id that it gets on the Hugging Face hub.
        scores: whether the model is a reward model, which scores texts, and no language model.
        adapters: those that were exported without their model.
        license_id: None: that of the base model, if it is known.
    """
    config = contents.config or {}
    base = base_model(config)
    base_id = hub_id(base)
    datasets = hub_datasets(config.get("data", {}).get("train_files"))
    tags = ["megarl", "reinforcement-learning" if "algorithm" in config else "fine-tuned"]
    if adapters:
        tags.append("lora")
    front: dict[str, object] = {
        "library_name": "peft" if adapters else "transformers",
        "pipeline_tag": "text-classification" if scores else "text-generation",
        "tags": tags,
    }
    if base_id:
        front["base_model"] = base_id
    if datasets:
        front["datasets"] = datasets
    front |= {"license": license_id} if license_id else license_of(base)
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {Path(place).resolve().name}",
        f"Trained from `{base or 'an unknown model'}` for {contents.state.step} steps. {training(config)}"
        f"{adapted(config, adapters)}",
        f"```python\n{loading(place, scores=scores, adapters=adapters)}\n```",
        _table("## Scores", ("metric", "first", "at this step"), _scores(history, contents.state.step)),
        _table("## Data", ("key", "files"), _files(config)),
        _table("## Versions", ("package", "version"), list((contents.versions or {}).items())),
        f"## Configuration\n\n```yaml\n{yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)}```",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def loading(place: Path | str, *, scores: bool, adapters: Lora | None = None) -> str:
    """Return the lines of Python that load an exported model, or adapters with their base."""
    kind = "AutoModelForSequenceClassification" if scores else "AutoModelForCausalLM"
    if adapters:
        base, revision = repository(adapters.base)
        options = (f', revision="{revision}"' if revision else "") + ", num_labels=1" * scores
        return (
            f"from peft import PeftModel\nfrom transformers import {kind}\n"
            f'model = {kind}.from_pretrained("{base}"{options})\n'
            f'model = PeftModel.from_pretrained(model, "{place}")'
        )
    lines = [f'from transformers import {kind}; model = {kind}.from_pretrained("{place}")']
    if not scores:
        lines.append(f'from vllm import LLM; engine = LLM("{place}")')
    return "\n".join(lines)


def serving(out: Path, adapters: Lora | None = None) -> str:
    """Return the shell's line that serves an exported language model, or adapters with their base."""
    if adapters is None:
        return f"vllm serve {shlex.quote(str(out))}"
    most = next((rank for rank in RANKS_OF_VLLM if rank >= adapters.rank), adapters.rank)
    name = shlex.quote(f"{out.resolve().name}={out}")
    base, revision = repository(adapters.base)
    base = shlex.quote(base) + (f" --revision {shlex.quote(revision)}" if revision else "")
    return f"vllm serve {base} --enable-lora --max-lora-rank {most} --lora-modules {name}"


def adapted(config: RunConfig, adapters: Lora | None) -> str:
    """Say what the weights are if adapters learned; '' if all weights did."""
    if adapters:
        return f" These are adapters (LoRA) of rank {adapters.rank}, to be loaded with the model `{adapters.base}`."
    section = _model_section(config)
    is_merged = section.get("lora_rank") or section.get("lora_adapter_path")
    return " Only adapters (LoRA) learned; they are merged into the weights." if is_merged else ""


def base_model(config: RunConfig) -> str | None:
    """Return the model that a run started from; None if its configuration does not say."""
    path = _model_section(config).get("path")
    return None if path is None else str(path)


def _model_section(config: RunConfig) -> RunConfig:
    section: RunConfig = config.get("actor_rollout_ref", config).get("model", {})
    return section


def hub_id(path: str | None) -> str | None:
    """Return the id of a model of the Hugging Face hub; None if its name shows that it is elsewhere."""
    name, _ = repository(path or "")
    is_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name)
    if not is_id or (path and Path(path).exists()):
        return None
    return name


def license_of(base: str | None) -> dict[str, str]:
    """Return the fields on the licence of a base model, from the card in its directory or in the cache of the hub."""
    from huggingface_hub import hf_hub_url  # takes half a second
    from huggingface_hub.repocard import metadata_load

    place = local_path(base) if base else None
    if base and place and not place.is_dir():
        place = downloaded(base, [CARD_FILE])
    if place is None:
        return {}
    try:
        known = metadata_load(place / CARD_FILE) or {}
    except (OSError, ValueError, yaml.YAMLError):  # a card that cannot be read says nothing
        return {}
    found = {name: str(known[name]) for name in LICENSE if isinstance(known.get(name), str)}
    link = found.get("license_link", "://")
    if "://" not in link:  # a file next to the base
        del found["license_link"]
        base_id = hub_id(base)
        return found | ({"license_link": hf_hub_url(base_id, link)} if base_id else {})
    return found


def training(config: RunConfig) -> str:
    """Say in a sentence how the model was trained."""
    if "algorithm" in config:
        estimator = config["algorithm"].get("adv_estimator", "an unknown estimator")
        return f"Reinforcement learning (`adv_estimator: {estimator}`); the reward is that of {_judge(config)}."
    return "It is a reward model." if "center_rewards_coefficient" in config else "Supervised fine-tuning."


def _judge(config: RunConfig) -> str:
    """Name what scores the responses."""
    environment = config.get("environment", {})
    name = environment.get("path") or environment.get("name")
    if name:
        return f"the environment `{name}`"
    path = config.get("custom_reward_function", {}).get("path")
    if path:
        return f"`{path}`"
    return "a reward model" if config.get("reward_model", {}).get("enable") else "built-in rules"


def _scores(history: Sequence[Row], step: int) -> list[tuple[str, str, str]]:
    """Return the first value of each headline metric, and the last up to `step`."""
    found: dict[str, list[float]] = {}
    for row in history:
        if row["step"] > step:
            continue
        shown = {name: row[name] for name in (REWARD, *LEARNT) if name in row}
        validation = {f"validation, {source}": value for source, value in validation_of(row).items()}
        for name, value in (shown | validation).items():
            found.setdefault(name, []).append(value)
    return [(name, f"{values[0]:.4g}", f"{values[-1]:.4g}") for name, values in found.items()]


def _files(config: RunConfig) -> Iterator[tuple[str, str]]:
    for key in ("train_files", "val_files"):
        value = config.get("data", {}).get(key)
        if value:
            files = [value] if isinstance(value, str) else value
            yield f"data.{key}", ", ".join(f"`{file}`" for file in files)


def _table(heading: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown below its heading; '' if it has no row."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    rule = f"|{'---|' * len(titles)}"
    return "\n".join([heading, "", f"| {' | '.join(titles)} |", rule, *lines]) if lines else ""

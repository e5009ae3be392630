"""The inspection of all rows before a run: what each of them can teach, kept for the next start."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from megarl.config.faults import ConfigError, Fault, fault_of
from megarl.config.root import Config, RewardTrainConfig, SFTConfig
from megarl.data import findings_cache
from megarl.data.columns import Needs, PromptColumns
from megarl.data.config import PreferenceDataSection, SFTDataSection
from megarl.data.messages import prompt_faults, text_faults
from megarl.data.rows import Rows
from megarl.data.truths import KINDS, Kind, TruthFindings, inspect_rows
from megarl.rewards.config import RulesSection
from megarl.section import listed

NUM_SHOWN = 3


def check_rows(config: Config) -> Iterator[str]:
    """Yield a remark for each kind of row that cannot teach, with the number of such rows and the first of them.

    Raises:
        ConfigError: a row cannot be read, or so many have ground truths that their rules cannot read that a step with
            such rows would stop the run.
    """
    section = config.rules
    if section is None or not section.trial_rows:
        return
    columns = PromptColumns(section=config.data, needs=Needs.of(config.rules, config.custom_reward_function))
    with fault_of("data.train_files"):
        found = _inspect_prompts(config, columns)
    faults = []
    for key, findings in found.items():
        kinds: list[Kind] = ["column"]
        if stops(section, findings.counts.get("truth", 0), findings.num_rows):
            kinds.append("truth")
        for kind in kinds:
            faults += [Fault(key, f"{message}. {_remedy(config, key, kind)}") for message in _messages(kind, findings)]
    if faults:
        raise ConfigError(faults)
    for key, findings in found.items():
        for kind in KINDS:
            yield from (f"{key}: {message}" for message in _messages(kind, findings))


def check_responses(config: SFTConfig | RewardTrainConfig) -> Iterator[str]:
    """Yield a remark for each kind of row whose responses cannot teach, with the number of such rows and the first.

    Raises:
        ConfigError: a prompt or a response cannot be read.
    """
    for key, names in {"data.train_files": config.data.train_files, "data.val_files": config.data.val_files}.items():
        if not names:
            continue
        with fault_of(key):
            found = _inspect_responses(config.data, names)
        remedy = f"Mend the rows (`megarl prepare --check {listed(names)[0]}` lists them)"
        faults = [Fault(key, f"{message}. {remedy}") for message in _messages("column", found)]
        if faults:
            raise ConfigError(faults)
        for kind in KINDS:
            yield from (f"{key}: {message}" for message in _messages(kind, found))


def _inspect_responses(data: SFTDataSection | PreferenceDataSection, names: str | Sequence[str]) -> TruthFindings:
    keys = [data.response_key] if isinstance(data, SFTDataSection) else [data.chosen_key, data.rejected_key]
    rows = Rows(names, columns=[data.prompt_key, *keys])
    findings = TruthFindings(len(rows))
    for index, row in enumerate(rows):
        place = rows.place(index)
        faults = [f"{data.prompt_key}: {fault}" for fault in prompt_faults(row[data.prompt_key])]
        for key in keys:
            faults += [f"{key}: {fault}" for fault in text_faults(row[key], may_be_empty=len(keys) == 1)]
        for fault in faults:
            findings.add("column", fault, place)
        responses = [] if faults else [row[key].strip() for key in keys]
        if not all(responses):
            findings.add("silent", KINDS["silent"], place)
        elif len({*responses}) < len(responses):
            findings.add("equal", KINDS["equal"], place)
    return findings


def _inspect_prompts(config: Config, columns: PromptColumns) -> Mapping[str, TruthFindings]:
    """Return what the inspection of each set of files found, by its key."""
    sets = {"data.train_files": config.data.train_files, "data.val_files": config.data.val_files}
    files = {key: listed(names) for key, names in sets.items() if names}
    question = [files, asdict(columns.section), asdict(columns.needs)]
    place = findings_cache.place_of([name for names in files.values() for name in names], question)
    kept = findings_cache.read(place)
    if kept is not None:
        return {key: TruthFindings.of(value) for key, value in kept.items()}
    found = dict[str, TruthFindings]()
    prompts = None
    for key, names in files.items():
        found[key], own = inspect_rows(columns, names, training_prompts=prompts)
        prompts = own if prompts is None else prompts
    findings_cache.write(place, {key: asdict(findings) for key, findings in found.items()})
    return found


def stops(section: RulesSection, num_faulty: int, num_rows: int, *, only_errors: bool = True) -> bool:
    """Return whether failures on this share of rows would stop a run. `only_errors`: none of them came too late."""
    match section.on_failure:
        case "stop":
            return num_faulty > 0
        case "mask":
            return 2 * num_faulty > num_rows
        case "score":
            return num_faulty >= num_rows and only_errors


def _messages(kind: Kind, findings: TruthFindings) -> Iterator[str]:
    number = findings.counts.get(kind, 0)
    if not number:
        return
    shown = findings.shown[kind][:NUM_SHOWN]
    first = "; ".join(f"{finding.place}, {finding.message}" for finding in shown)
    if kind in ("column", "truth", "text"):
        yield f"{number:,} of {findings.num_rows:,} rows: {KINDS[kind]}: {first}"
    else:
        yield f"{number:,} of {findings.num_rows:,} rows: {KINDS[kind]}; the first is {shown[0].place}"


def _remedy(config: Config, key: str, kind: Kind) -> str:
    names = listed(getattr(config.data, key.removeprefix("data.")))
    file = names[0] if names else "FILE"
    remedy = f"Mend the rows (`megarl prepare --check {file}` lists them)"
    if kind == "column":
        return remedy
    return f"{remedy} or their data source; reward_model.trial_rows=0 starts without this look"

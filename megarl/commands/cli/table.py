"""The table of all commands. Everything here is a declaration; the modules that it names do the work."""

from pathlib import Path

import click

from megarl.commands.cli import completion, version
from megarl.commands.cli.command import CONTEXT, Command, Commands, Tasks
from megarl.commands.cli.kinds import (
    RunDirectory,
    amount,
    checkpoint,
    engine_milliseconds,
    link_microseconds,
    mean_lengths,
    peak_tflops,
    values_of_key,
)
from megarl.data.prepare.options import AT_LEAST_ONE, option
from megarl.platform.log import LEVELS, set_level

TRAINS = "Train"
USES = "Use what was trained"
PLANS = "Plan and check"
STARTS = "Begin"
PATH = click.Path(path_type=Path)

LAUNCH = """\
Without a launcher, the command starts trainer.n_gpus_per_node ranks on this host. Under torchrun, mpirun or srun it \
joins the ranks of that launcher. `megarl config` explains every key."""


def configuration(root: str, *, first: str = "CONFIG.yaml") -> click.Argument:
    """Return the argument for YAML files and keys.

    Args:
        root: the command whose keys a shell completes.
        first: what the help names as the first argument.
    """
    return click.Argument(
        ["configuration"],
        nargs=-1,
        required=True,
        type=completion.ConfigurationKey(root),
        metavar=f"{first} [MORE.yaml] [a.b.c=value ...]",
    )


def _flag(name: str, text: str) -> click.Option:
    return option(name, text, is_flag=True)


def _json(instead: str) -> click.Option:
    return _flag("--json as_json", f"Print one JSON object instead of {instead}.")


def _log_level() -> click.Option:
    return option(
        "--log-level",
        "Least level of the records that the log shows.",
        type=click.Choice(LEVELS),
        default="info",
        expose_value=False,
        callback=lambda context, option, level: set_level(level),
    )


DETACH = _flag(
    "--detach",
    "Check the configuration, then train in a process that outlives this terminal; prints into "
    "RUN_DIR/log/console.txt.",
)
RUNS = click.Argument(["runs"], nargs=-1, required=True, type=RunDirectory(), metavar="RUN_DIR...")
BEST = _flag("--best", "Take the run's checkpoint with the best validation.")
TRAIN = Command(
    "train",
    configuration("train"),
    option(
        "--replay",
        "Learn again from samples that a run kept in trainer.rollout_data_dir: from a file, or from all files of "
        "a directory that follow the checkpoint.",
        type=PATH,
        metavar="DIR_OR_FILE",
    ),
    DETACH,
    _log_level(),
    module="megarl.commands.train",
    section=TRAINS,
    text="Reinforcement learning: PPO, GRPO and their relatives.\n\nA run whose directory has a checkpoint resumes "
    f"from it. {LAUNCH}",
    example="megarl train configs/ppo_countdown.yaml trainer.n_gpus_per_node=2 actor_rollout_ref.actor.optim.lr=1e-6",
    free=True,
)
SFT = Command(
    "sft",
    configuration("sft"),
    DETACH,
    _log_level(),
    module="megarl.commands.sft",
    section=TRAINS,
    text=f"Supervised fine-tuning.\n\nWrites a Hugging Face directory at the end, RUN_DIR/huggingface. {LAUNCH}",
    example="megarl sft configs/quickstart_sft.yaml data.train_files=sft.parquet model.path=DIR",
    free=True,
)
TRAIN_REWARD = Command(
    "train-reward",
    configuration("train-reward"),
    DETACH,
    _log_level(),
    module="megarl.commands.train_reward",
    section=TRAINS,
    text="Training of a reward model from pairs of responses.\n\nWrites a Hugging Face directory at the end, "
    f"RUN_DIR/huggingface. {LAUNCH}",
    example="megarl train-reward configs/reward_tinystories.yaml",
    free=True,
)
SWEEP = Command(
    "sweep",
    configuration("train"),
    option(
        "--over",
        "A key and its values, the items of a YAML list; may repeat, for all combinations.",
        multiple=True,
        type=values_of_key,
        metavar="KEY=VALUE,VALUE...",
        shell_complete=completion.ConfigurationKey("train").shell_complete,
    ),
    option("--seeds", "Run each combination with the seeds 1 to N.", type=AT_LEAST_ONE, metavar="N"),
    option("--out", "Place of the runs' directories  [default: trainer.default_local_dir]", type=PATH, metavar="DIR"),
    _flag("--slurm", "Write a script for sbatch instead: an array of jobs, one a run."),
    _flag("--dry-run", "Check all runs, print their commands and start none."),
    module="megarl.commands.sweep",
    section=TRAINS,
    text="Run `megarl train` with several values of keys, one run after another, and compare the runs.\n\nChecks all "
    "runs before the first one starts. A run that fails does not end the sweep. Ctrl-C saves the step of the current "
    "run. The same command continues: it skips runs that are finished, and resumes the others. Exit code 1: a run "
    "failed. Exit code 2: a configuration is faulty. Exit code 75: a signal stopped the sweep.",
    example="megarl sweep configs/grpo_gsm8k.yaml --over actor_rollout_ref.actor.optim.lr=1e-6,3e-6 --seeds 3\n"
    "megarl sweep configs/grpo_gsm8k.yaml --over actor_rollout_ref.rollout.n=4,8 --out runs/n --slurm",
    free=True,
)
EVALUATE = Command(
    "evaluate",
    configuration("train", first="RUN_DIR|CHECKPOINT|CONFIG.yaml"),
    _log_level(),
    BEST,
    module="megarl.commands.evaluate",
    section=USES,
    text="Score a checkpoint on the validation files. Prints one JSON line to standard output.\n\nTakes the directory "
    "of a run, which keeps its configuration, or a checkpoint in it, or the configuration of the training run. Scores "
    "the latest checkpoint unless a checkpoint or --best is named; without any checkpoint, the model that the run "
    "starts from.",
    example="megarl evaluate checkpoints/countdown/ppo-qwen2.5-3b\n"
    "megarl evaluate checkpoints/countdown/ppo-qwen2.5-3b/global_step_100 data.val_files=test.parquet",
    free=True,
)
EXPORT = Command(
    "export",
    click.Argument(["checkpoint"], type=checkpoint),
    click.Argument(["out"], type=PATH),
    BEST,
    _flag("--adapter", "Write the adapters alone, a directory that PEFT and vLLM load."),
    option("--base", "The model that the adapters belong to, if its place has changed.", metavar="DIR_OR_ID"),
    option("--license", "The licence on the model card, such as apache-2.0  [default: the base's]", metavar="ID"),
    option(
        "--push-to",
        "Upload OUT to this repository of the Hugging Face hub; needs HF_TOKEN or `hf auth login`.",
        metavar="OWNER/NAME",
    ),
    _flag("--private", "Let only you and your organisation see the repository."),
    _flag("--trust-remote-code", "Let a tokenizer's own Python code run."),
    _log_level(),
    module="megarl.commands.export",
    section=USES,
    text="Write a checkpoint as a Hugging Face directory, which transformers and vLLM load.\n\nCHECKPOINT is "
    "RUN_DIR/global_step_N, or RUN_DIR for its latest or best checkpoint. Writes the actor, or the reward model of a "
    "run of train-reward. Adapters (LoRA) are merged into the model that they belong to, unless --adapter. Under "
    "torchrun, mpirun or srun the model is split over all ranks, so it need not fit into one process.",
    example="megarl export checkpoints/countdown/ppo-qwen2.5-3b out/ --best",
)
PLAN = Command(
    "plan",
    configuration("train"),
    option(
        "--run",
        "The command whose run is planned. The other two have no options of a sync or of an engine.",
        type=click.Choice(["train", "sft", "train-reward"]),
        default="train",
    ),
    option(
        "--device",
        "The device of a rank. here: this machine's GPU, or a share of its CPU, which is measured in seconds. "
        "auto: here, if trainer.device=cpu, if this machine has GPUs, or if the run has one rank; else h100.",
        type=click.Choice(["auto", "here", "h100", "h200", "b200"]),
        default="auto",
    ),
    option("--gpu-memory", "Memory of a device  [default: as --device says]", type=amount, metavar="AMOUNT"),
    option(
        "--host-memory",
        "Host memory of a node  [default: this machine's, if the run has one node that fits this machine]",
        type=amount,
        metavar="AMOUNT",
    ),
    option(
        "--gpus-per-node",
        "Ranks that share a node's links  [default: trainer.n_gpus_per_node]",
        type=AT_LEAST_ONE,
    ),
    option(
        "--intra-node-bandwidth",
        "Bandwidth from a rank to the ranks of its NVLink domain, per direction.",
        type=amount,
        default="400GB/s",
        metavar="AMOUNT",
    ),
    option(
        "--inter-node-bandwidth",
        "Bandwidth from a rank to other domains, per direction.",
        type=amount,
        default="45GB/s",
        metavar="AMOUNT",
    ),
    option(
        "--nvlink-domain",
        "Neighbouring ranks that NVLink connects, also over nodes: 72 of a GB200 NVL72  [default: a node's]",
        type=AT_LEAST_ONE,
        metavar="RANKS",
    ),
    option(
        "--latency-us",
        "Time of a message of no size within a domain, and between domains: assumed, not measured.",
        type=link_microseconds,
        default="2,15",
        metavar="INSIDE,BETWEEN",
    ),
    option(
        "--lengths",
        "Mean tokens, and those of the longest response, for the time  [default: the most]",
        type=mean_lengths,
        metavar="PROMPT,RESPONSE[,LONGEST]",
    ),
    option(
        "--peak-tflops",
        "Speed of a device at products of matrices; on CPUs also that of narrow models, by their hidden size "
        "(megarl doctor --peaks measures)  [default: as --device says]",
        type=peak_tflops,
        metavar="TFLOPS[,WIDTH:TFLOPS...]",
    ),
    option(
        "--memory-bandwidth",
        "Bandwidth of a device's own memory  [default: as --device says]",
        type=amount,
        metavar="AMOUNT",
    ),
    option(
        "--engine-ms",
        "Cost of an engine step on the host, and of each layer and sample in it (megarl doctor --peaks measures).",
        type=engine_milliseconds,
        default="0,0,0",
        metavar="STEP,LAYER,SAMPLE",
    ),
    _json("tables"),
    module="megarl.commands.plan",
    section=PLANS,
    text="Predict batches, memory, seconds and weight traffic of a run, without starting it.\n\nReads only config.json "
    "of the models. Exit code 1: the run does not fit into the memory of devices or hosts, or a model cannot be "
    "planned. Exit code 2: the configuration is faulty.",
    example="megarl plan configs/plans/llama-3-70b_64gpu.yaml --gpu-memory 141GB",
    free=True,
)
VERIFY = Command(
    "verify",
    click.Argument(["model_dir"]),
    click.Argument(
        ["overrides"],
        nargs=-1,
        type=completion.ConfigurationKey("verify"),
        metavar="[a.b.c=value ...]",
    ),
    _json("a table"),
    _log_level(),
    module="megarl.commands.verify",
    section=PLANS,
    text="Verify that weights reach the engine.\n\nLoads a checkpoint into the given Megatron split, syncs it to the "
    "given engine split, and compares the probabilities that trainer, engine and transformers give the same tokens. "
    "Then changes every weight and repeats. If MODEL_DIR holds only a config.json, the weights are random. The keys "
    "are those of a training run for model, trainer and engine; the default type is float32. Works under any launcher. "
    "Exit code 1: a check failed. Exit code 2: the configuration is faulty.",
    example="megarl verify DIRECTORY actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
)
DOCTOR = Command(
    "doctor",
    _flag("--peaks", "Measure the greatest speed of the devices too."),
    _flag("--patches", "List the code of other libraries that megarl replaces too."),
    module="megarl.commands.doctor",
    section=PLANS,
    text="Show what this machine has for training, and what it lacks.\n\nExit code 1: training cannot work here.",
    example="megarl doctor --peaks",
)
PREPARE = Tasks(
    "prepare",
    option(
        "--check",
        "List the faults of a parquet or JSON file of prompts, supervised pairs or preference pairs, by row.",
        type=click.Path(),
        metavar="FILE",
    ),
    option(
        "--kind",
        "The use of the checked file, in place of the one that its columns tell: rl for megarl train, sft for "
        "megarl sft, preference for megarl train-reward.",
        type=click.Choice(["rl", "sft", "preference"]),
    ),
    option("--prompt-key", "Column of the prompts of the checked file (data.prompt_key).", default="prompt"),
    option("--reward-fn-key", "Column of the checked file that picks the built-in reward.", default="data_source"),
    option(
        "--custom-reward-function",
        "Python file whose function or class scores instead of built-in rewards; its signature is checked.",
        type=click.Path(),
        metavar="FILE",
    ),
    option(
        "--custom-reward-name",
        "Name of the function or class in that file (custom_reward_function.name).",
        default="compute_score",
        metavar="NAME",
    ),
    option(
        "--reward-kwarg",
        "Name of a further argument of it (custom_reward_function.reward_kwargs); may be repeated.",
        multiple=True,
        metavar="NAME",
    ),
    _flag("--reward-model", "A reward model scores alone."),
    module="megarl.commands.prepare",
    section=STARTS,
    text="Make the files of a known task or of your own rows, or check a file.",
    example="megarl prepare countdown --out data/countdown\n"
    "megarl prepare own mine.csv --prompt question --answer solution --out data/mine\n"
    "megarl prepare --check data/mine/train.parquet",
)

CONFIG = Command(
    "config",
    click.Argument(
        ["words"],
        nargs=-1,
        type=completion.ConfigurationKey("train"),
        metavar="[SECTION|KEY ...] [RUN_DIR|CONFIG.yaml ...] [a.b.c=value ...]",
    ),
    option(
        "--of",
        "The command that reads the keys  [default: the command that knows most of them]",
        type=click.Choice(["train", "sft", "train-reward", "verify"]),
    ),
    _flag(
        "--check",
        "Check what the command checks before it starts: keys, places, models, all rows, the reward on a few of "
        "them, all prompts with the tokenizer of a local model, and the device.",
    ),
    _json("lines, {faults, notes} of --check"),
    module="megarl.commands.explain",
    section=PLANS,
    text="Explain the keys of a configuration.\n\nShows type, default and meaning of a key, or of the keys of a "
    "section, or lists the sections. With a configuration it also shows the value of a key and the place that sets it, "
    "or, without a name, all values that are set. A name may lack its beginning: `optim.lr`. Exit code 2: there is "
    "no such key, or the configuration is faulty.",
    example="megarl config algorithm.adv_estimator\nmegarl config optim.lr configs/ppo_countdown.yaml\n"
    "megarl config --check configs/ppo_countdown.yaml trainer.n_gpus_per_node=2",
    free=True,
)

CHAT = Command(
    "chat",
    click.Argument(["model"], type=PATH),
    option("--prompt", "Respond to this text and end; may be repeated.", multiple=True, metavar="TEXT"),
    option("--system", "The system message of the conversation.", metavar="TEXT"),
    _flag("--plain", "Continue texts as they are, also if the model has a chat template."),
    option("--temperature", "0 is greedy.", type=click.FloatRange(0), default=0.7),
    option("--max-tokens", "Of a response.", type=AT_LEAST_ONE, default=512),
    click.Option(["--seed"], type=int, help="Of the responses."),
    _flag("--trust-remote-code", "Let a tokenizer's own Python code run."),
    module="megarl.commands.chat",
    section=USES,
    text="Talk to a model, in one process.\n\nMODEL is an exported model, a run or a checkpoint. A checkpoint is "
    "exported to a temporary directory first. A model with a chat template has a conversation; /new begins another "
    "one. Without a template each line is continued alone. Ctrl-D ends.",
    example="megarl chat checkpoints/countdown/ppo-qwen2.5-3b\n"
    'megarl chat out/ --prompt "What is 3 + 4?" --temperature 0',
)
COMPARE = Command(
    "compare",
    RUNS,
    option("--metric", "A further metric, or a pattern such as actor/*; may repeat.", multiple=True, metavar="NAME"),
    _json("tables"),
    module="megarl.commands.compare",
    section=USES,
    text="Show runs next to each other: differences of their configurations, headline metrics, times.\n\nReads "
    "config.yaml and metrics.jsonl in the runs' directories.",
    example="megarl compare checkpoints/gsm8k/grpo checkpoints/gsm8k/dapo --metric actor/entropy",
)

WATCH = Command(
    "watch",
    click.Argument(["run"], type=RunDirectory(), metavar="RUN_DIR"),
    module="megarl.commands.watch",
    section=USES,
    text="Watch a running job from another terminal.\n\nShows the step and its phase, the curves of reward and KL, and "
    "a prompt's response at first and now. Reads the files of the run, also on another machine that sees them.",
    example="megarl watch checkpoints/countdown/ppo-qwen2.5-3b",
)
REPORT = Command(
    "report",
    RUNS,
    option("--out", "The page  [default: report.html in RUN_DIR, or here for several runs]", type=PATH, metavar="FILE"),
    _flag(
        "--samples",
        "Write samples.html in RUN_DIR too: all samples that the run kept in trainer.rollout_data_dir.",
    ),
    module="megarl.commands.report",
    section=USES,
    text="Write one page about a run, or about several side by side.\n\nThe pages need no network.",
    example="megarl report checkpoints/gsm8k/grpo --samples\n"
    "megarl report checkpoints/gsm8k/grpo checkpoints/gsm8k/dapo --out both.html",
)

NEW = Command(
    "new",
    click.Argument(["directory"], type=PATH),
    option(
        "--task",
        "own: rows of yours, with 64 to begin with.",
        type=click.Choice(["own", "countdown", "gsm8k"]),
        default="own",
    ),
    option("--model", "The model to train.", default="Qwen/Qwen2.5-0.5B-Instruct", metavar="DIR_OR_ID"),
    _flag(
        "--tiny",
        "Make a random model of 1 M parameters for this machine's CPU too; needs no network.",
    ),
    module="megarl.commands.new.__main__",
    section=STARTS,
    text="Write a small project into a new directory.\n\nIt has a configuration, a reward with its test, and a page "
    "with the commands that make its data, plan, train and export.",
    example="megarl new boxes --tiny\nmegarl new stories --task countdown --model models/mine",
)

CONVERT = Command(
    "convert",
    click.Argument(["source"], metavar='SCRIPT.sh|CONFIG.yaml|"COMMAND LINE"'),
    click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED, metavar="[VARIABLE=value ...] [ARGUMENT ...]"),
    module="megarl.commands.convert.__main__",
    section=STARTS,
    text="Write a launch of another trainer as a configuration.\n\nReads the keys of verl and of its forks, and the "
    "flags of TRL, OpenRLHF, slime, ms-swift and NeMo-RL. Expands the variables of a shell script without running it; "
    "further words are its variables and its arguments. A comment tells each key that has another name, that was "
    "dropped, as it changes nothing, or that is to be decided. Exit code 1: something is to be decided. Exit code 2: "
    "nothing could be read.",
    example="megarl convert run_qwen2-7b.sh > run.yaml\nmegarl convert run.sh MODEL_PATH=models/mine > run.yaml",
    free=True,
)

COMMANDS = (
    *(NEW, CONVERT, PREPARE),
    *(TRAIN, SWEEP, SFT, TRAIN_REWARD),
    *(EVALUATE, EXPORT, CHAT, WATCH, REPORT, COMPARE),
    *(CONFIG, PLAN, VERIFY, DOCTOR),
)
"""All commands, in the order of the help. A new command is declared above and named here."""


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(version.line())
        ctx.exit()


MEGARL = Commands(
    "megarl",
    commands=COMMANDS,
    context_settings=CONTEXT,
    help="Reinforcement-learning post-training of language models.\n\n`megarl COMMAND --help` explains a command.",
    epilog=completion.SETUP,
    params=[
        click.Option(
            ["-V", "--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_version,
            help="Show version, commit and engine.",
        )
    ],
)
"""The command `megarl`."""

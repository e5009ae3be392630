"""`megarl convert`: scripts are expanded without being run, and each of their keys is in the file or in a comment."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from megarl.commands.convert.__main__ import convert, main
from megarl.commands.convert.expand import UNKNOWN, Expander, links
from megarl.commands.convert.launch import find_launch
from megarl.commands.convert.shell import follow_script
from megarl.commands.convert.write import to_text
from megarl.platform.errors import UserError

RUN = "python3 -m verl.trainer.main_ppo"
KEYS = "data.train_files=a.parquet actor_rollout_ref.model.path=org/m critic.model.path=org/m"


def words(script: str, *arguments: str) -> list[str]:
    """Return the words behind `run`, the only program of a script."""
    (command,) = [one for one in follow_script(script, arguments) if one.words[0] == "run"]
    return list(command.words[1:])


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("A=1\nrun x=$A y=${A}2", ["x=1", "y=12"]),
        ("run ${B:-4} ${B-5} ${B:+6} ${C:=7} $C", ["4", "5", "7", "7"]),
        ('A=(a "b c")\nA+=(d)\nrun "${A[@]}" ${#A[@]} ${A[1]} "${A[*]}"', ["a", "b c", "d", "3", "b", "c", "a b c d"]),
        ("A='x y'\nrun $A \"$A\" '$A'", ["x", "y", "x y", "$A"]),
        ("run a \\\n  b \\\n  c", ["a", "b", "c"]),
        ("run a \\\n  # b \\\n  c", ["a"]),
        ('run "$@"', ["p", "q"]),
        ("run $1 ${2:-z} $#", ["p", "q", "2"]),
        ("N=4\nrun $((N * 2 + 1)) $(( N > 3 )) $((2 ** 10))", ["9", "1", "1024"]),
        ("P=/a/b.t.z\nrun ${P##*/} ${P%.*} ${P%%.*} ${P/b/c}", ["b.t.z", "/a/b.t", "/a/b", "/a/c.t.z"]),
        ("if [ $# -lt 3 ]; then exit 1; fi\nrun a", ["a"]),
        ('if [ "$X" = b ]; then A=1; elif [[ $# == 2 && -z $X ]]; then A=2; else A=3; fi\nrun $A', ["2"]),
        ("if [ -f /etc/passwd ]; then A=1; else A=2; fi\nrun $A", ["2"]),
        ('case "${D:-gpu}" in npu) A=1;; gpu|cpu) A=2;; *) A=3;; esac\nrun $A', ["2"]),
        ("D=$(python3 -c 'import x' 2>/dev/null && echo npu || echo gpu)\nrun $D", ["gpu"]),
        ("A=''\nfor x in 1 2 3; do A=\"$A$x\"; done\nrun $A", ["123"]),
        ("f() { A=$1; }\nf 7\nrun $A", ["7"]),
        ("export A=3 B\ndeclare -i C=4\nrun $A $C", ["3", "4"]),
        ("cat <<EOF > file\nrun wrong\nEOF\nrun right | tee log 2>&1", ["right"]),
        ('CMD="run a b"\neval $CMD', ["a", "b"]),
        ("run trainer.logger=['console','wandb'] x=\\\"none\\\"", ["trainer.logger=[console,wandb]", 'x="none"']),
        ("run $(dirname /a/b/c.sh) $(basename /a/b.sh .sh) $(echo \"2*3\" | bc)", ["/a/b", "b", "6"]),
        ("{ run a; } && :", ["a"]),
        ("cd /x && run a || exit 1", ["a"]),
        ("A=1\nsrun -w node bash -lc \"cd /x && ray job submit -- bash -c 'run $A b'\"", ["1", "b"]),
        ("ssh node sh -x -c 'run $0 \"$@\"' script c d", ["script.sh", "c", "d"]),
    ],
)  # fmt: skip
def test_words_are_those_of_a_shell(script: str, expected: list[str]) -> None:
    assert words(script, "p", "q") == expected


def test_what_only_a_shell_knows_is_marked() -> None:
    environment, program = words("run $HOME/data $(date +%s)")
    assert links(environment) == "${oc.env:HOME}/data" and program == UNKNOWN


def test_no_command_of_a_script_is_run(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    script = tmp_path / "run.sh"
    script.write_text(
        f'touch {victim}\nA=$(touch {victim})\neval "touch {victim}"\n`touch {victim}`\n{RUN} {KEYS} x.y=$A\n'
    )
    assert main([str(script)]) == 1
    assert not victim.exists()


@pytest.mark.parametrize(
    "script",
    [
        "A=xxxxxxxxxx\n" + "A=$A$A\n" * 40 + "run $A",
        "f() { f; }\nf",
        "A=" + "$(" * 5000,
        "(" * 5000,
        "for a in 1 2 3 4 5 6 7 8 9 0; do " * 6 + "x; " + "done; " * 6,
        "echo 'open",
        "run ${A:-$((9**9**9**9))}",
    ],
)
def test_hostile_script_ends_soon(script: str) -> None:
    try:
        follow_script(script)
    except UserError as error:
        assert str(error)


def test_arithmetic_is_of_numbers_alone() -> None:
    expander = Expander({"A": "__import__('os').system('x')"}, [], lambda text: "")
    assert expander.arithmetic("A + 1") == UNKNOWN
    assert expander.arithmetic("(lambda: 1)()") == UNKNOWN


@pytest.mark.parametrize(
    "command",
    [
        f"{RUN} {KEYS}",
        f"PYTHONUNBUFFERED=1 nohup {RUN} --config-name=ppo_trainer {KEYS} > log 2>&1 &",
        f"ray job submit --address=x --runtime-env=e.yaml -- {RUN} {KEYS}",
        f"torchrun --nproc_per_node=2 -m verl.trainer.main_ppo {KEYS}",
        f'L=(uv run python3)\n"${{L[@]}}" -m verl.trainer.main_ppo {KEYS}',
        f"x=1\nsrun main_ppo {KEYS}",
        f"deepspeed --module verl.trainer.main_ppo {KEYS}",
    ],
)
def test_launch_is_found_behind_its_launcher(command: str) -> None:
    assert set(KEYS.split()) <= set(find_launch(command).words)


def test_launch_with_most_keys_is_taken() -> None:
    found = find_launch(f"{RUN} a.b=1 a.c=2 a.d=3\n{RUN} {KEYS} trainer.nnodes=2")
    assert "trainer.nnodes=2" in found.words and found.others == 1
    with pytest.raises(UserError, match="no command of the script has keys"):
        find_launch("echo nothing")


SCRIPT = f"""
MODEL=${{MODEL:-org/m}}
{RUN} --config-path=./config --config-name='ppo_megatron_trainer' \\
    data.train_files="['$HOME/a.parquet', '$HOME/b.parquet']" \\
    actor_rollout_ref.model.path=$MODEL critic.model.path=$MODEL \\
    +actor_rollout_ref.actor.fsdp_config.param_offload=True \\
    ++actor_rollout_ref.rollout.mode=async \\
    ~trainer.nothing \\
    algorithm.adv_estimator=gae algorithm.use_kl_in_reward=False \\
    actor_rollout_ref.model.lora.rank=8 \\
    actor_rollout_ref.model.lora.type=dora \\
    trainer.experiment_name=$(date +%s) \\
    trainer.project_name='a # b' $@
"""


def test_every_key_is_in_file_or_comment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    assert main([str(script), "MODEL=mine", "trainer.nnodes=2"]) == 1
    text, told = capsys.readouterr()
    tree = yaml.safe_load(text)
    assert tree["actor_rollout_ref"]["model"]["path"] == "mine" and tree["trainer"]["nnodes"] == 2
    assert tree["data"]["train_files"] == ["${oc.env:HOME}/a.parquet", "${oc.env:HOME}/b.parquet"]
    assert tree["trainer"]["project_name"] == "a # b" and "experiment_name" not in tree["trainer"]
    assert tree["actor_rollout_ref"]["actor"]["megatron"]["param_offload"] is True
    assert tree["actor_rollout_ref"]["actor"]["shuffle"] is False and "# verl's default" in text
    assert (tree["actor_rollout_ref"]["model"]["lora_rank"], tree["actor_rollout_ref"]["model"]["lora_alpha"]) == (
        8,
        32,
    )
    comments = [line for line in text.splitlines() if line.lstrip().startswith("#")]
    for key in (
        "lora.type=dora",
        "~trainer.nothing",
        "experiment_name=$(...)",
        "rollout.mode=async",
        "config-name",
    ):
        assert any(key in line for line in comments), key
    assert any(line.strip() == "# was actor_rollout_ref.actor.fsdp_config.param_offload" for line in comments)
    assert "3 to be decided" in told


def test_nothing_to_decide_is_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{RUN} {KEYS}"]) == 0
    assert main(["/nonexistent/run.sh"]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("run-$(date +%s)", "run"),
        ("$(date)_run", "run"),
        ("a_$(date)_b", "a_b"),
        ("./a.b-$(date)/c-$(date)", "./a.b/c"),
        ("a/$(date)", None),
        ("$(date)", None),
    ],
)
@pytest.mark.parametrize(
    ("launch", "key"),
    [
        (f"{RUN} {KEYS} trainer.experiment_name=", "trainer.experiment_name"),
        (f"{RUN} {KEYS} +trainer.default_local_dir=", "trainer.default_local_dir"),
        (
            "python -m trl.scripts.grpo --model_name_or_path org/m --num_generations 4 --beta 0 --output_dir ",
            "trainer.default_local_dir",
        ),
    ],
)
def test_name_of_a_run_lacks_its_date(written: str, name: str | None, launch: str, key: str) -> None:
    found, _ = convert(f"{launch}{written}")
    assert found.leaves.get(key) == name
    assert ("only the script can tell the value: write it" in found.decisions.values()) == (name is None)


def test_resume_path_that_nothing_reads_is_dropped() -> None:
    found, _ = convert(f"{RUN} {KEYS} trainer.resume_from_path=checkpoints/")
    assert "trainer.resume_from_path=checkpoints/" in found.dropped and not found.decisions
    found, _ = convert(f"{RUN} {KEYS} trainer.resume_mode=resume_path trainer.resume_from_path=a/global_step_2")
    assert found.leaves["trainer.resume_from_path"] == "a/global_step_2"


def test_dropped_key_that_others_forbid_is_decided() -> None:
    found, _ = convert(f"{RUN} {KEYS} data.train_batch_size=1024 data.gen_batch_size=3072")
    assert "let both be equal" in found.decisions["data.gen_batch_size=3072"] and not found.dropped


def test_file_of_hydra_is_read_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nhydra: {searchpath: [x]}\ndata: {train_batch_size: 8}\n"
    )
    script = tmp_path / "run.sh"
    script.write_text(f"{RUN} --config-path=config --config-name mine {KEYS} data.seed=3\n")
    found, _ = convert(str(script))
    assert found.leaves["data.train_batch_size"] == 8 and found.leaves["data.seed"] == 3
    assert any(key.startswith("hydra.searchpath") for key in found.dropped)


def test_yaml_file_is_converted(tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text("data: {train_files: a, trust_remote_code: true}\nactor_rollout_ref: {model: {path: org/m}}\n")
    found, _ = convert(str(file))
    assert found.leaves["data.train_files"] == "a" and "data.trust_remote_code=True" in found.dropped


@pytest.mark.parametrize("value", ["$TOOLS", "$PWD/tools.yaml", "'${ oc.env:HOME}'"])
def test_variable_of_environment_is_no_other_key(value: str) -> None:
    key = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
    found, _ = convert(f"{RUN} {KEYS} {key}={value}")
    assert [written for written in found.decisions if written.startswith(key)]
    assert not [written for written in found.dropped if written.startswith(key)]
    for others in ("${data.unheard}", "${data.unheard}/${trainer.unheard}"):
        found, _ = convert(f"{RUN} {KEYS} {key}='{others}'")
        assert [written for written in found.dropped if written.startswith(key)]


@pytest.mark.parametrize(
    "program", ["verl.trainer.fsdp_sft_trainer", "verl.trainer.sft_trainer", "openrlhf.cli.train_sft"]
)
def test_supervised_launch_is_no_configuration_of_train(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"torchrun -m {program} data.train_files=a model.partial_pretrain=m optim.lr=1e-5"]) == 2
    out, err = capsys.readouterr()
    assert not out and f"launches {program}: supervised fine-tuning" in err and "megarl prepare own --sft" in err


def test_launch_with_rewards_is_converted_whatever_its_name() -> None:
    found, _ = convert(f"python train_after_sft.py {KEYS}")
    assert found.leaves


def test_keys_outside_of_the_command_are_told() -> None:
    found, _ = convert(f"{RUN} {KEYS} \\\n  # trainer.nnodes=1 \\\n  trainer.total_epochs=2")
    assert "trainer.total_epochs=2" in found.decisions and "trainer.total_epochs" not in found.leaves
    launch = "python3 train.py --hf-checkpoint org/m --rollout-batch-size 32 --num-rollout 9"
    found, _ = convert(f"A=(--n-samples-per-prompt 8 --custom-rm-path a.py --lr 2)\n{launch}\n  ${{A[@]}} --seed 1")
    assert {"--n-samples-per-prompt", "--custom-rm-path", "--lr", "--seed"} <= found.decisions.keys()
    assert found.leaves["data.train_batch_size"] == 32


def test_text_of_a_script_cannot_break_the_file() -> None:
    found, _ = convert(f"{RUN} {KEYS} 'trainer.project_name=\x1b[31mred\nx: 1' $'trainer.unheard=\x1b]0;t\x07'")
    text = to_text(found, "a\nb: 1")
    assert "\x1b" not in text and "\x07" not in text
    assert set(yaml.safe_load(text)) <= {"data", "actor_rollout_ref", "critic", "algorithm", "trainer"}


@pytest.mark.parametrize("name", ["my run.sh", "two\ttabs.sh", "my theirs.yaml", "a=b c.sh"])
def test_name_with_blanks_is_a_file(tmp_path: Path, name: str) -> None:
    source = tmp_path / name
    source.write_text("a: {b: 1}\n" if source.suffix == ".yaml" else f"{RUN} {KEYS}\n")
    found, heading = convert(str(source))
    assert found.leaves or found.decisions
    assert "a command line" not in heading


def test_missing_file_and_command_line_differ(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: FileNotFoundError"):
        convert(str(tmp_path / "run.sh").replace(" ", ""))
    found, heading = convert(f"{RUN} {KEYS} x={'long' * 2_000}")
    assert found.leaves
    assert "a command line" in heading


def test_values_that_are_no_yaml_are_told(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("a: [1\n")
    found, _ = convert(str(file))
    assert any("not valid YAML" in why for why in found.decisions.values())
    found, _ = convert("trl grpo --model_name_or_path *x --seed 1 --beta ${y:z}")
    assert found.leaves["actor_rollout_ref.model.path"] == "*x"
    found, _ = convert(f"{RUN} {KEYS} 'data.x=[*a]' 'trainer.y=${{oc.select:a,b}}'")
    assert len(found.decisions) == 2


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
@pytest.mark.parametrize(
    "script",
    [
        'declare -A M=([a]=1 ["b c"]=2)\nM[d]=3\nk=a\nrun "${M[$k]}" "${M["b c"]}" ${M[d]} ${#M[@]} "${M[x]:-no}"',
        "declare -A M\nM[a]=1\nM[a]+=2\nrun ${M[a]} ${!M[@]}",
        'A=(a b c)\nA[1]=x\nA[3]=d\nrun "${A[@]}" "${A[@]:1:2}" "${A[@]/#/p}" ${A[-1]} ${!A[@]}',
        'A=([2]=z [0]=y)\nrun ${A[2]} ${A[0]} "${A[1]}"',
        'run "${@:2}" "${@:1:1}" "${A[@]:-none}" ${1:+set}',
        "N=5\nrun $((N > 3 ? 10 : 20)) $(((N - 8) / 2)) $((N % -3)) $((!N)) $((0x10 + 010)) $((2**3**2)) $((-2**2))",
        "N=1\nrun $((N++)) $N $((++N)) $((N += 4, N * 2)) $((N == 7 && 1 || 0)) $((1 ? 2 : 1 / 0))",
        "N=3\nM=N+1\n((M++))\nlet K=N*2\nrun $M $K $((K--)) $K",
        "A=\nfor ((i = 0; i < 3; i++)); do A=$A$i; done\nrun $A $i",
        "i=0\nwhile [ $i -lt 4 ]; do i=$((i + 1)); if [ $i = 2 ]; then continue; fi; A+=$i; done\nrun $A",
        "i=0\nuntil (( i >= 3 )); do ((i += 1)); done\nrun $i",
        "for x in 1 2 3; do for y in a b; do [[ $y == b ]] && break; A+=$x$y; done; [ $x = 2 ] && break; done\nrun $A",
        "while [ $# -gt 0 ]; do case $1 in -m) M=$2; shift 2;; *) R+=(\"$1\"); shift;; esac; done\nrun $M \"${R[@]}\"",
        "read -r -d '' C <<EOF\nrun a \\\\\n  b \"c  d\"\nEOF\nrun $C",
        "X=2\nA=$(cat <<EOF\none $X $((X + 1))\n'quoted'\nEOF\n)\nrun \"$A\"",
        "X=2\nA=$(cat <<-'EOF'\n\tone $X\n\tEOF\n)\nrun \"$A\"",
        'bash -s m "n o" <<EOF\nprintf "%s\\0" a \\$1 "\\$2"\nEOF\nrun e',
        "IFS=, read -r A B <<< 'x,y,z'\nread C D <<< \"  p q  r \"\nrun \"$A\" \"$B\" \"$C\" \"$D\"",
        'IFS=: read -ra L <<< "1:2:3"\nreadarray -t R <<< "u\nv w"\nrun "${L[@]}" "${R[@]}"',
        'A=(x y z)\nJ=$(IFS=,; echo "[${A[*]}]")\nrun "$J"\nIFS=,\nV=1,2\nrun $V "${A[*]}"',
        "for s in {1..3} {c..a}; do A+=$s; done\nrun {a,b{1,2}} x{,.bak} {1..3}. {a} '{b,c}' a={1,2}",
        "for i in $(seq 2 4) $(seq 2) $(seq 6 -2 1); do A+=$i; done\nrun $A",
        "f() { local a=$1 b; b=$2; local c=$*; A=\"$a|$b|$c\"; }\nf 'x y' z\nrun \"$A\"",
        "run $'it\\'s' \"costs $'5\" $'\\\\'",
        "run $'a\\tb\\nc' \"$(basename /x/y.z .z)\" \"$(dirname y)\"",
        'N=A\nA=3\nrun ${!N} ${A:+"${A}b c"} "${A/3/$N}" ${#A}',
        "P=hello\nrun ${P:1:3} ${P: -2} ${P:1:-1} ${P^} ${P^^} ${P//l/L}",
        "set -- a 'b c'\nshift\nrun \"$@\" $#\nunset N\nrun \"${N:-d e}\"",
    ],
)  # fmt: skip
def test_words_agree_with_bash(script: str) -> None:
    real = subprocess.run(
        ["bash", "-c", f"run() {{ printf '%s\\0' \"$@\"; }}\n{script}", "script.sh", "p", "-m", "q r"],
        capture_output=True,
        encoding="utf-8",
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    ours = follow_script(script, ["p", "-m", "q r"])
    skipped = {"run": 1, "printf": 2}
    assert [word for one in ours for word in one.words[skipped[one.words[0]] :]] == real.stdout.split("\0")[:-1]


@pytest.mark.parametrize("count", ["²", "x", "9" * 5000])
def test_odd_count_of_shift_stops_no_script(count: str) -> None:
    assert words(f"shift {count}\nrun a") == ["a"]


def test_changing_parameter_is_marked() -> None:
    assert words("run $RANDOM x$$ ${SECONDS}") == [UNKNOWN, f"x{UNKNOWN}", UNKNOWN]


@pytest.mark.parametrize("start", ["bash run.sh", "sbatch --nodes=1 ./run.sh", "srun bash run.sh", "source run.sh"])
def test_script_of_here_document_is_followed(start: str) -> None:
    found = find_launch(f"N=3\ncat > run.sh <<EOF\n{RUN} {KEYS} data.seed=$N\nEOF\n{start}")
    assert "data.seed=3" in found.words
    assert "data.seed=3" in find_launch(f"N=3\nsbatch -N 1 <<EOF\n{RUN} {KEYS} data.seed=$N\nEOF").words

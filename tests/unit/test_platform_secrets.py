import gc
import logging
import runpy
import sys
import threading
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.commands.export import read_arguments as export_arguments
from megarl.config.load import load_config, to_dict
from megarl.platform.secrets import guard_output, is_secret, redact, redacted
from megarl.section import flatten

HIDDEN = "Swordf1sh/quiet+"
NO_VARIABLES: dict[str, str] = {}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("mlflow at http://ann:Swordf1sh@host:5000/x", "mlflow at http://***@host:5000/x"),
        ("s3://AKIA:Swordf1sh/qui@et@bucket/a", "s3://***@bucket/a"),
        ("s3:/ann:Swordf1sh@bucket/a", "s3:/***@bucket/a"),
        ("https://ann:p@ss:w0rd@host", "https://***@host"),
        ("https://ann:p#s?s@host", "https://***@host"),
        ("x://a:b@c and y://d:e@f", "x://***@c and y://***@f"),
        ("https://h/o?X-Amz-Credential=a%2Fb&X-Amz-Date=1&X-Amz-Signature=0a1b", None),
        ("https://a.blob.core.windows.net/c?sv=2024&sig=a%2Bb%3D&se=1", None),
        ("https://h/o?key=abc&page=2", "https://h/o?key=***&page=2"),
        ("engine_kwargs.api_key.value=abc", "engine_kwargs.api_key.value=***"),
        ("foo.password=abc,bar=1", "foo.password=***,bar=1"),
        ("DefaultEndpointsProtocol=https;AccountKey=ab/c==;X=1", "DefaultEndpointsProtocol=https;AccountKey=***;X=1"),
        ("Authorization: Bearer abcdefgh.ijk=", "Authorization: Bearer ***"),
        ("as hf_abcdefghijklmnopqrstuvwxyz01", "as ***"),
        ("as AKIAIOSFODNN7EXAMPLE.", "as ***."),
        ("as ghp_abcdefghijklmnopqrstuvwxyz0123456789", "as ***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nx", "***\nx"),
    ],
)
def test_secrets_are_hidden_by_name_or_shape(text: str, shown: str | None) -> None:
    found = redact(text, NO_VARIABLES)
    if shown is None:
        assert not any(part in found for part in ("a%2F", "0a1b", "a%2Bb")) and "***" in found
        assert "Date=1" in found or "se=1" in found
    else:
        assert found == shown


@pytest.mark.parametrize(
    "text",
    [
        "hdfs://namenode:8020/user/ann/train.parquet",
        "abfss://container@account.dfs.core.windows.net/train.parquet",
        "http://localhost:5000/x@y",
        "http://localhost:5000 or ann@host",
        "hf://datasets/openai/gsm8k@main/train.parquet",
        "sqlite:////tmp/runs/mlflow.db",
        "s3://bucket/a b?versionId=3",
        "actor_rollout_ref.actor.loss_agg_mode=token-mean",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384",
        "the tokenizer has no end-of-sequence token: set eos_token in its files",
        "eos_token='</s>' pad_token=None stop_token=3",
        "data.prompt_key=prompt and num_key_value_heads=2, data.tokenizer=/m/tokenizer.model",
        "unknown token: x; the key: y",
        "token: 5, eos_token: </s>, authorization: required",
        "columns 'token', 'label' and ['input_ids', 'token', 'label'], ('eos_token', '</s>')",
        "{'pad_token': b'abc', 'eos_token': ['</s>', '<|end|>']}",
        "Qwen/Qwen2.5-3B at step 12, 99:59@noon",
        "rope_scaling={'type': 'yarn'}",
    ],
)
def test_ordinary_text_comes_out_as_it_went_in(text: str) -> None:
    assert redact(text, {"PATH": text, "PASSWORD_FILE": text, "SHORT_TOKEN": "the"}) == text


def test_values_of_variables_are_hidden_wherever_they_stand() -> None:
    environ = {"AWS_SECRET_ACCESS_KEY": HIDDEN, "MY_TOKEN": f"{HIDDEN}longer", "HOME": "/home/ann"}
    text = f"{HIDDEN}longer, x{HIDDEN}x, a%20b Swordf1sh%2Fquiet%2B at /home/ann"
    assert redact(text, environ) == "***, x***x, a%20b *** at /home/ann"


def test_the_process_own_variables_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", HIDDEN)
    assert redact(f"says {HIDDEN}") == "says ***"


PIECES = st.sampled_from([*"ab:/@?&='\" ;.*,1#{}[]()", "token", "://", ":/", "key=", "***", "('token', b'"])


@given(st.lists(PIECES).map("".join))
def test_redacting_twice_changes_nothing_more(text: str) -> None:
    once = redact(text, {"MY_TOKEN": "abababab"})
    assert redact(once, {"MY_TOKEN": "abababab"}) == once


@given(
    user=st.text(alphabet="abc123", min_size=1),
    password=st.text(alphabet=st.sampled_from("abcXYZ019:#?/%+="), max_size=20).map(lambda text: f"q{text}Zz"),
)
def test_no_password_of_a_uri_remains(user: str, password: str) -> None:
    shown = redact(f"cannot open s3://{user}:{password}@bucket/a/b.parquet (why)", NO_VARIABLES)
    assert shown == "cannot open s3://***@bucket/a/b.parquet (why)"


def test_mappings_lose_what_their_keys_and_values_tell() -> None:
    tree = {
        "data": {"files": ["s3://a:Swordf1sh@b/c", "d.parquet"], "tokenizer": "m", "n": 3, "off": None},
        "engine_kwargs": {"hf_token": "abc", "keys": {"api_key": ["a", "b"]}, "secret": ""},
        "a.password": "abc",
        "a.api_key.value": "abc",
        "hf_token": 1234567890,
        "credential": {"of": [{"ann": 1.5, "is_set": True, "since": None}]},
    }
    assert redacted(tree, NO_VARIABLES) == {
        "data": {"files": ["s3://***@b/c", "d.parquet"], "tokenizer": "m", "n": 3, "off": None},
        "engine_kwargs": {"hf_token": "***", "keys": {"api_key": ["***", "***"]}, "secret": ""},
        "a.password": "***",
        "a.api_key.value": "***",
        "hf_token": "***",
        "credential": {"of": [{"ann": "***", "is_set": True, "since": None}]},
    }
    assert redacted(redacted(tree, NO_VARIABLES), NO_VARIABLES) == redacted(tree, NO_VARIABLES)


def test_no_key_of_ours_sounds_like_a_secret() -> None:
    argv = ["data.train_files=t.parquet", "actor_rollout_ref.model.path=m", "critic.model.path=m"]
    config = load_config(argv, world_size=None, check_paths=False)
    assert not [path for path, _ in flatten(to_dict(config)) if any(map(is_secret, path.split(".")))]


@pytest.fixture
def _own_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = {sys: ("excepthook", "unraisablehook"), threading: ("excepthook",), warnings: ("formatwarning",)}
    for module, name in [(module, name) for module, names in hooks.items() for name in names]:
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(logging, "_logRecordFactory", logging.getLogRecordFactory())


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.usefixtures("_own_hooks")
@pytest.mark.parametrize(
    ("module", "arguments"),
    [("megarl", ["plan", "nowhere.yaml"]), ("megarl", ["prepare"]), ("benchmarks", []), ("megarl", ["doctor"])],
)
def test_programs_without_ranks_redact_too(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(SystemExit):
        runpy.run_module(module, run_name="__main__")
    assert sys.excepthook.__module__ == "megarl.platform.secrets"


def test_arguments_that_are_refused_lose_their_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        export_arguments(["s3://ann:Swordf1sh@bucket", "out"], world_size=None)
    assert "s3:/***@bucket is no directory" in capsys.readouterr().err


class Silent:
    """An object that fails whenever it is asked."""

    def __repr__(self) -> str:
        raise OSError("token=Swordf1sh")

    def __del__(self) -> None:
        raise OSError("s3://ann:Swordf1sh@bucket")


@pytest.mark.usefixtures("_own_hooks")
def test_unformattable_log_arguments_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    guard_output()
    handler = logging.StreamHandler(sys.stderr)
    logger = logging.getLogger("somebody.elses")
    logger.addHandler(handler)
    unsound = Silent()
    try:
        logger.warning("token=Swordf1sh %d", "s3://ann:Swordf1sh@bucket")
        logger.warning("asked %r", unsound)
        logger.warning(unsound)
    finally:
        logger.removeHandler(handler)
    del unsound
    gc.collect()
    assert capsys.readouterr().err.splitlines()[:4] == [
        "token=*** %d (its arguments cannot be formatted: TypeError)",
        "asked %r (its arguments cannot be formatted: OSError)",
        "Silent (its arguments cannot be formatted: OSError)",
        "Exception ignored in: Silent.__del__",
    ]


@pytest.mark.usefixtures("_own_hooks")
def test_loggers_warnings_and_uncaught_errors_redact(capsys: pytest.CaptureFixture[str]) -> None:
    guard_output()
    handler = logging.StreamHandler(sys.stderr)
    logger = logging.getLogger("somebody.elses")
    logger.addHandler(handler)
    try:
        try:
            raise OSError("no " + "s3://ann:Swordf1sh@bucket")
        except OSError as error:
            logger.exception("lost %s", "s3://ann:Swordf1sh@bucket")
            sys.excepthook(type(error), error, error.__traceback__)
        logger.warning("%d arguments")
    finally:
        logger.removeHandler(handler)
    print(warnings.formatwarning("password=Swordf1sh", UserWarning, "f.py", 1), file=sys.stderr)
    thread = threading.Thread(target=lambda: int("token=Swordf1sh"), name="worker")
    thread.start()
    thread.join()
    said = capsys.readouterr().err
    assert "Swordf1sh" not in said
    assert said.count("Traceback") == 3 and said.count("no s3://***@bucket") == 2
    assert "lost s3://***@bucket" in said and "in thread worker" in said and "%d arguments" in said

"""Models and tokenizers on S3, from a real server on this machine: what is read, what is refused, and when."""

import json
import os
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megarl.platform import cache, remote
from megarl.commands.plan import main as plan
from megarl.config.faults import ConfigError
from megarl.config.load import load_config, load_sft_config, load_verify_config
from megarl.data.tokenizer import load_tokenizer
from megarl.distributed import copies
from megarl.models.architecture import hf_shapes, read_architecture
from megarl.models.config import ModelSection
from megarl.models.source import Source
from megarl.platform.remote import RemoteDirectory
from tests.support.hollow import write_hollow, write_zeros
from tests.support.s3 import s3_server
from tests.support.sentencepieces import train_sentencepiece
from tests.support.tiny import SIZES, VARIANTS, write_checkpoint

LLAMA = SIZES | VARIANTS["llama"]
RUN = (
    *("data.train_files=/nowhere.parquet", "data.max_prompt_length=64", "data.max_response_length=64"),
    *("algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n=2", "critic.model.path=a/b"),
)


class Bucket:
    """A bucket, `s3://models`."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def put(self, directory: Path, name: str) -> str:
        """Upload the files of a directory; returns its URI."""
        for file in directory.iterdir():
            self.write(f"{name}/{file.name}", file.read_bytes())
        return f"s3://models/{name}"

    def write(self, name: str, content: bytes) -> None:
        """Upload an object at once: its ETag is the MD5 of the content."""
        signed = "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request"
        headers = {"Content-Type": "application/octet-stream", "Authorization": signed}
        request = urllib.request.Request(f"{self._endpoint}/models/{name}", content, headers, method="PUT")
        urllib.request.urlopen(request, timeout=20).close()


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server("models") as environ:
        yield environ


@pytest.fixture
def bucket(server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for key, value in server.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "WAITS_S", ())
    as_a_new_process()
    return Bucket(server["AWS_ENDPOINT_URL"])


def as_a_new_process() -> None:
    """Forget what a process remembers as long as it lives."""
    copies._copies.clear()
    remote.remote_directory.cache_clear()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, and files that nobody needs."""
    directory = write_checkpoint(tmp_path_factory.mktemp("model"), "llama")
    piece = train_sentencepiece(tmp_path_factory.mktemp("tokenizer") / "small.model", vocab_size=200)
    load_tokenizer(str(piece)).save(directory)
    for name in ("pytorch_model.bin", "modeling_own.py", "consolidated.safetensors"):
        (directory / name).write_bytes(b"nobody needs this")
    return directory


def read(uri: str) -> Source:
    as_a_new_process()
    return Source.read(ModelSection(path=uri))


def faults(*arguments: str) -> dict[str, str]:
    """Return the faults of a run's configuration, except for its data."""
    as_a_new_process()
    try:
        load_config([*RUN, *arguments], world_size=None)
    except ConfigError as error:
        found: dict[str, str] = {}
        for fault in error.faults:
            found[fault.path] = f"{found.get(fault.path, '')}{fault.message}\n"
        return {key: message for key, message in found.items() if key != "data.train_files"}
    return {}


def test_model_and_tokenizer_load_from_uri(bucket: Bucket, model: Path, tmp_path: Path) -> None:
    uri = bucket.put(model, "whole")
    assert faults(f"actor_rollout_ref.model.path={uri}") == {}
    assert not (tmp_path / "cache").exists(), "to check it, nothing is copied"
    source, local = read(uri), Source.read(ModelSection(path=str(model)))
    assert (source.architecture, source.hf_config) == (local.architecture, local.hf_config)
    assert source.directory.is_relative_to(tmp_path / "cache")
    copied = {path.name for path in source.directory.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} < copied
    assert not {"pytorch_model.bin", "modeling_own.py", "consolidated.safetensors"} & copied
    ours, theirs = load_file(source.directory / "model.safetensors"), load_file(model / "model.safetensors")
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    spoken = [each.encode("3 + 5", add_special_tokens=True) for each in (source.tokenizer(), source.tokenizer(uri))]
    assert spoken == 2 * [local.tokenizer().encode("3 + 5", add_special_tokens=True)]
    with_code = ModelSection(path=uri, trust_remote_code=True)
    assert (Source.read(with_code).directory / "modeling_own.py").is_file()


def test_a_sentencepiece_model_is_read_from_its_uri(bucket: Bucket, tmp_path: Path) -> None:
    piece = train_sentencepiece(tmp_path / "small.model", vocab_size=200)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    bucket.write("pieces/small.model", piece.read_bytes())
    bucket.write("pieces/chat_template.jinja", (tmp_path / "chat_template.jinja").read_bytes())
    local, there = load_tokenizer(str(piece)), load_tokenizer("s3://models/pieces/small.model")
    messages = [{"role": "user", "content": "3 + 5"}]
    assert there.chat(messages) == local.chat(messages)
    with pytest.raises(ValueError, match="no such file: s3://models/pieces/other.model"):
        load_tokenizer("s3://models/pieces/other.model")


def test_a_file_uri_is_the_directory_itself(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "cache"))
    assert read(f"file://{model}").directory == model
    assert load_tokenizer(f"file://{model}").vocab_size == 200
    assert faults(f"actor_rollout_ref.model.path=file://{model}") == {}
    gone = faults("actor_rollout_ref.model.path=file:///nowhere")
    assert "no directory file:///nowhere" in gone["actor_rollout_ref.model.path"]
    assert not (tmp_path / "cache").exists()


def test_only_changed_remote_model_is_copied_again(bucket: Bucket, model: Path) -> None:
    uri = bucket.put(model, "changing")
    first = read(uri).directory
    bucket.put(model, "changing")  # the same bytes, at another time: the ETags are the same
    assert read(uri).directory == first
    config = json.loads((model / "config.json").read_text())
    bucket.write("changing/config.json", json.dumps(config | {"rms_norm_eps": 1e-5}).encode())
    assert Source.read(ModelSection(path=uri)).directory == first, "a run keeps the files that it began with"
    second = read(uri)
    assert second.directory != first
    assert second.architecture.norm_eps == 1e-5


def test_file_with_wrong_checksum_is_no_copy(bucket: Bucket, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = bucket.put(model, "flipped")
    download = RemoteDirectory.download

    def flipped(self: RemoteDirectory, name: str, file: Path, count: Callable[[int], None]) -> str:
        digest = download(self, name, file, count)
        return digest if name != "model.safetensors" else digest[::-1]

    monkeypatch.setattr(RemoteDirectory, "download", flipped)
    with pytest.raises(ValueError, match=r"s3://models/flipped .*model.safetensors arrived with the MD5 "):
        read(uri)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no directory s3://models/NAME"),
        ({"model.safetensors": b""}, "s3://models/NAME has no config.json"),
        ({"config.json": json.dumps(LLAMA).encode()}, "s3://models/NAME has no weights"),
        (
            {"config.json": b"[" * 100_000, "model.safetensors": b""},
            "s3://models/NAME/config.json is nested too deeply",
        ),
        (
            {"config.json": json.dumps(LLAMA | {"hidden_size": 0}).encode(), "model.safetensors": b""},
            "s3://models/NAME/config.json: hidden_size 0",
        ),
        (
            {
                "config.json": json.dumps(LLAMA).encode(),
                "model.safetensors.index.json": b'{"weight_map": {"w": "gone.safetensors"}}',
            },
            "s3://models/NAME/model.safetensors.index.json lists gone.safetensors, which is not there",
        ),
    ],
)
def test_missing_remote_files_are_configuration_faults(
    bucket: Bucket, capsys: pytest.CaptureFixture[str], files: dict[str, bytes], message: str
) -> None:
    name = f"lacking-{zlib.crc32(message.encode())}"
    for file, content in files.items():
        bucket.write(f"{name}/{file}", content)
    uri, message = f"s3://models/{name}", message.replace("NAME", name)
    assert message in faults(f"actor_rollout_ref.model.path={uri}")["actor_rollout_ref.model.path"]
    assert message in faults("actor_rollout_ref.model.path=a/b", f"critic.model.path={uri}")["critic.model.path"]
    reward = faults("actor_rollout_ref.model.path=a/b", "reward_model.enable=true", f"reward_model.model.path={uri}")
    assert message in reward["reward_model.model.path"]
    as_a_new_process()
    with pytest.raises(ConfigError, match="model.path"):
        load_sft_config(["data.train_files=/nowhere.parquet", f"model.path={uri}"], world_size=None)
    if "weights" not in message:
        with pytest.raises(ConfigError, match="model.path"):
            load_verify_config([f"actor_rollout_ref.model.path={uri}"], world_size=None)
    if "config.json" in message:
        assert plan(["configs/plans/llama-3-70b_64gpu.yaml", f"actor_rollout_ref.model.path={uri}"]) == 1
        assert message in capsys.readouterr().err


def test_missing_tokenizers_are_configuration_faults(bucket: Bucket, model: Path) -> None:
    uri, policy = bucket.put(model, "policy"), "actor_rollout_ref.model.path=s3://models/policy"
    bucket.write("bare/config.json", b"{}")
    keys = {
        "data.tokenizer": [],
        "critic.model.tokenizer_path": [f"critic.model.path={uri}"],
        "reward_model.model.input_tokenizer": ["reward_model.enable=true", f"reward_model.model.path={uri}"],
    }
    for key, more in keys.items():
        assert "s3://models/bare has no tokenizer" in faults(policy, *more, f"{key}=s3://models/bare")[key]
        assert "no such file: s3://models/bare/x.model" in faults(policy, *more, f"{key}=s3://models/bare/x.model")[key]
        assert "neither pyarrow nor fsspec opens nope://" in faults(policy, *more, f"{key}=nope://bare")[key]
        assert key not in faults(policy, *more, f"{key}={uri}")


def test_unreachable_server_is_fault_with_remedy(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    found = faults("actor_rollout_ref.model.path=s3://models/x")
    assert found["actor_rollout_ref.model.path"].startswith("s3://models/x cannot be opened: ")
    assert "AWS_ACCESS_KEY_ID" in found["actor_rollout_ref.model.path"]


def test_damaged_remote_file_is_named_by_uri(bucket: Bucket, tmp_path: Path) -> None:
    write_hollow(tmp_path / "half", LLAMA)
    os.truncate(tmp_path / "half" / "model.safetensors", 5000)
    uri = bucket.put(tmp_path / "half", "half")
    with pytest.raises(ValueError, match=r"^s3://models/half: .*model.safetensors cannot be read as safetensors"):
        read(uri)


def test_only_weight_files_of_index_are_copied(bucket: Bucket, tmp_path: Path) -> None:
    (directory := tmp_path / "sharded").mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA))
    shapes = dict(hf_shapes(read_architecture(LLAMA)))
    names = list(shapes)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2], "other.safetensors": names}
    for file, part in parts.items():
        write_zeros(directory / file, {name: shapes[name] for name in part})
    weight_map = {name: file for file in ("a.safetensors", "b.safetensors") for name in parts[file]}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    source = read(bucket.put(directory, "sharded"))
    assert {path.name for path in source.directory.glob("*.safetensors")} == {"a.safetensors", "b.safetensors"}

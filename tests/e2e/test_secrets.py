"""A real run with secrets planted in every place, and code in its model: no secret is kept or shown, no code runs."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from urllib.parse import quote

import pyarrow.parquet as pq
import pytest
from pyarrow.fs import FileSelector, S3FileSystem

from megarl.platform.secrets import REDACTED
from tests.support.programs import run_program
from tests.support.s3 import s3_server
from tests.support.tiny import plant_code
from tests.support.workspace import Workspace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TOKEN, JUDGE, USER, PASSWORD, HUB = (
    "hf_planted0000aaaa1111BBBB",
    "judge/planted+22",
    "userplanted33",
    "pass/planted44",
    "x-55-y",
)
VARIABLES = {
    "HF_TOKEN": TOKEN,
    "JUDGE_API_KEY": JUDGE,
    "AWS_SECRET_ACCESS_KEY": "aws+planted/66",
    "MLFLOW_TRACKING_PASSWORD": "mlflowplanted77",
    "OPENAI_KEY": "openaiplanted88\n",
    "DB_CREDENTIALS": "cre\\dent'ials\"planted99",
}
SECRETS = {*map(str.strip, VARIABLES.values()), USER, PASSWORD, quote(PASSWORD, safe=""), HUB, "planted99"}
REWARD = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info):
    print("asking the judge with", os.environ["JUDGE_API_KEY"])
    others = {"key": os.environ["OPENAI_KEY"].strip(), "login": os.environ["DB_CREDENTIALS"]}
    if len(solution_str) % 4 == 0:
        raise PermissionError(f"the judge does not know {os.environ['JUDGE_API_KEY']}, {others}")
    return {"score": 1.0, "pred": f"{others}"}
"""


@dataclass(frozen=True)
class Bucket:
    """A bucket on a local server that asks for a password."""

    filesystem: S3FileSystem
    query: str  # names the server

    def uri(self, path: str) -> str:
        return f"s3://{USER}:{quote(PASSWORD, safe='')}@bucket/{path}?{self.query}"

    def put(self, directory: Path) -> None:
        for file in filter(Path.is_file, directory.iterdir()):
            with self.filesystem.open_output_stream(f"bucket/{directory.name}/{file.name}") as stream:
                stream.write(file.read_bytes())

    def texts(self) -> Iterator[tuple[Path, str]]:
        for info in self.filesystem.get_file_info(FileSelector("bucket", recursive=True)):
            if info.is_file:
                with self.filesystem.open_input_stream(info.path) as stream:
                    yield Path(info.path), stream.read().decode(errors="replace")


@pytest.fixture
def bucket(workspace: Workspace) -> Iterator[Bucket]:
    """Serve a bucket that holds the training data."""
    with s3_server("bucket") as environ:
        place = environ["AWS_ENDPOINT_URL"].removeprefix("http://")
        filesystem = S3FileSystem(access_key=USER, secret_key=PASSWORD, endpoint_override=place, scheme="http")
        pq.write_table(pq.read_table(workspace.train), "bucket/train.parquet", filesystem=filesystem)
        yield Bucket(filesystem, f"scheme=http&region=us-east-1&endpoint_override={quote(place, safe='')}")


def kept(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yield every file as text; decompress parquet."""
    for path in directory.rglob("*"):
        if path.suffix == ".parquet":
            yield path, str(pq.read_table(path).to_pydict())
        elif path.is_file():
            yield path, path.read_bytes().decode(errors="replace")


def test_secrets_and_code_that_are_planted(
    workspace: Workspace, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    model = copytree(workspace.model, tmp_path / "model")
    witness = plant_code(model)
    bucket.put(model)
    monkeypatch.setenv("MEGARL_CACHE", str(cache := tmp_path / "cache"))
    (tmp_path / "reward.py").write_text(REWARD)
    run_dir = tmp_path / "runs" / "run"
    code, output = run_program(
        *(sys.executable, "-m", "megarl", "train"),
        f"data.train_files={bucket.uri('train.parquet')}",
        "data.train_batch_size=8",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={bucket.uri('model')}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.n=2",
        f"+actor_rollout_ref.rollout.engine_kwargs.hf_token={HUB}",
        "algorithm.adv_estimator=grpo",
        f"custom_reward_function.path={tmp_path / 'reward.py'}",
        "reward_model.trial_rows=0",
        "trainer.n_gpus_per_node=1",
        "trainer.logger=[console,jsonl,mlflow]",
        f"trainer.default_local_dir={run_dir}",
        f"trainer.default_hdfs_dir={bucket.uri('mirror')}",
        f"trainer.rollout_data_dir={run_dir / 'samples'}",
        "trainer.total_training_steps=1",
        "trainer.save_freq=1",
        timeout_s=400,
    )
    assert code == 0 and (run_dir / "global_step_1" / "manifest.json").is_file(), output
    assert not witness.exists()
    assert f"the judge does not know {REDACTED}" in output
    assert f"it printed 'asking the judge with {REDACTED}'" in output
    [keys] = re.findall("there is a secret in ([^:]*):", " ".join(output.split()))
    assert set(keys.split(", ")) == {
        "data.train_files",
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.rollout.engine_kwargs.hf_token",
        "reward_model.model.input_tokenizer",  # which follows the model's path
        "trainer.default_hdfs_dir",
    }
    assert f"compute_score of {tmp_path / 'reward.py'} (SHA-256: " in output
    assert f"s3://{REDACTED}@bucket/train.parquet" in (run_dir / "config.yaml").read_text()
    assert f"s3://{REDACTED}@bucket/model: its model is copied to {cache}/model-" in output
    texts = dict(kept(run_dir.parent)) | dict(kept(cache)) | dict(bucket.texts())
    assert "modeling_planted.py" not in {path.name for path in cache.rglob("*")}, (
        "code was copied although it may not run"
    )
    assert not any(secret in str(path) for path in cache.rglob("*") for secret in SECRETS)
    assert Path("bucket/mirror/global_step_1/manifest.json") in texts
    assert {"mlflow.db", "metrics.jsonl", "step_1.parquet", "config.yaml"} <= {path.name for path in texts}
    assert f"s3://{REDACTED}@bucket/train.parquet" in texts[run_dir.parent / "mlflow.db"]
    assert "compute_score of " in texts[run_dir.parent / "mlflow.db"]
    for secret in SECRETS:
        assert secret not in output
        assert not [path for path, text in texts.items() if secret in text], secret

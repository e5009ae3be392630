"""Models, data and configurations bring code along; it runs only if the configuration allows it."""

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoConfig, LlamaConfig, dynamic_module_utils

from megarl.config.faults import ConfigError
from megarl.config.load import load_config
from megarl.data.rows import Rows
from megarl.data.tokenizer import load_tokenizer
from tests.support.sentencepieces import train_sentencepiece
from tests.support.tiny import plant_code

MESSAGES = [{"role": "user", "content": "3 5 = 8"}]


class Planted:
    """An object whose pickle, and whose YAML, calls code."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.witness,)


@pytest.fixture
def own_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A model directory with a tokenizer class of its own, and the file that its code would leave."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    model = tmp_path / "model"
    load_tokenizer(str(train_sentencepiece(tmp_path / "small.model", vocab_size=200))).save(model)
    LlamaConfig().save_pretrained(model)
    witness = plant_code(model)
    (model / "tokenization_planted.py").write_text(
        f"from pathlib import Path\nPath({str(witness)!r}).touch()\n"
        "from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast): pass\n"
    )
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "tokenization_planted.Own"]}}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    return model, witness


def test_tokenizer_code_runs_only_with_trust_remote_code(own_tokenizer: tuple[Path, Path], tmp_path: Path) -> None:
    model, witness = own_tokenizer
    with pytest.raises(
        ValueError, match=r"Python code, which was not run: .*actor_rollout_ref\.model\.trust_remote_code"
    ):
        load_tokenizer(str(model))
    assert not witness.exists()
    trusted = load_tokenizer(str(model), trust_remote_code=True)
    assert witness.exists()
    assert trusted.decode(trusted.encode("3 5", add_special_tokens=False)) == "3 5"


def test_python_in_a_yaml_file_is_a_fault(tmp_path: Path) -> None:
    file = tmp_path / "planted.yaml"
    file.write_text(f"trainer: !!python/object/apply:os.mkdir [{tmp_path / 'ran'}]\n")
    for argv in ([str(file)], [f"trainer.project_name=!!python/object/apply:os.mkdir [{tmp_path / 'ran'}]"]):
        with pytest.raises(ConfigError):
            load_config(argv, world_size=None, check_paths=False)
    assert not (tmp_path / "ran").exists()


def test_pickles_in_a_parquet_file_stay_bytes(tmp_path: Path) -> None:
    """A Python extension type in the metadata of a column and of the file, which pyarrow once unpickled."""
    planted = pickle.dumps(Planted(tmp_path / "ran"))
    marks = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": planted}
    schema = pa.schema([pa.field("prompt", pa.string(), metadata=marks), ("bulk", pa.binary())])
    table = pa.table({"prompt": ["3 5 = 8"], "bulk": [planted]}, schema=schema)
    pq.write_table(table, tmp_path / "planted.parquet")
    assert Rows(str(tmp_path / "planted.parquet"), columns=["prompt", "bulk"])[0]["bulk"] == planted
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{{ messages.append(messages[0]) }}",
    ],
)
def test_chat_templates_reach_nothing_but_their_messages(tmp_path: Path, template: str) -> None:
    model = train_sentencepiece(tmp_path / "small.model", vocab_size=200)
    with pytest.raises(ValueError, match="the chat template of .* refuses the messages: .*unsafe"):
        load_tokenizer(str(model), chat_template=template).chat(MESSAGES)


def test_what_is_planted_would_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a test that plants it in a checkpoint, and sees that it did not, could not tell otherwise."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    LlamaConfig().save_pretrained(tmp_path / "model")
    witness = plant_code(tmp_path / "model")
    AutoConfig.from_pretrained(tmp_path / "model", trust_remote_code=False)
    assert not witness.exists()
    AutoConfig.from_pretrained(tmp_path / "model", trust_remote_code=True)
    assert witness.exists()

"""True and false are no numbers, for any key."""

import pytest

from megarl.config.load import read
from megarl.config.root import Config, RewardTrainConfig, SFTConfig, VerifyConfig
from megarl.config.schema import Schema


@pytest.mark.parametrize("root", [Config, SFTConfig, RewardTrainConfig, VerifyConfig])
@pytest.mark.parametrize("word", ["true", "false"])
def test_no_key_of_a_number_takes_a_bool(root: type, word: str) -> None:
    numbers = [path for path, value in Schema.of(root).leaves.items() if type(value) in (int, float)]
    assert len(numbers) > 10
    _, faults, _ = read(root, [f"{path}={word}" for path in numbers])
    said = {fault.path: fault.message for fault in faults}
    for path in numbers:
        assert path in said, path
    assert said["trainer.save_freq"] == f"should be a number, not {word.title()}"


def test_list_items_and_optional_numbers_refuse_booleans() -> None:
    argv = ["trainer.profile_steps=[1,true]", "trainer.max_ckpt_to_keep=true", "trainer.peak_tflops=true"]
    argv.append("reward_model.weights={format: true}")
    _, faults, _ = read(Config, argv)
    assert {"trainer.profile_steps", "trainer.max_ckpt_to_keep", "trainer.peak_tflops", "reward_model.weights"} <= {
        f.path for f in faults
    }

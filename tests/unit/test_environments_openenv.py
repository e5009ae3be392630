"""The client of OpenEnv's HTTP protocol and a server that may fail, stall and lie."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from megarl.environments.openenv import OpenEnv
from megarl.environments.protocol import Row, Step
from megarl.rewards.http import ServerError
from tests.support.http_server import serving
from tests.support.openenv_server import OpenEnvServer

KEY = "sesame-open-1234567890"
ROW = Row(prompt="p", data_source="own", ground_truth="7", extra_info={"level": 3}, index=5, seed=11)


@pytest.fixture(scope="module")
def server() -> Iterator[OpenEnvServer]:
    with serving(OpenEnvServer()) as running:
        yield running


def started(server: OpenEnvServer, **options: Any) -> OpenEnv:
    environment = OpenEnv(**{"url": f"{server.address}/", "attempt_s": 1.0, "num_attempts": 2, **options})
    assert environment.reset(ROW) == "begin"
    return environment


def test_requests_are_of_the_protocol(server: OpenEnvServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_KEY", KEY)
    fields = {"task": "level", "answer": "ground_truth"}
    environment = started(server, reset=fields, api_key_variable="OPENENV_KEY")
    (path, body, key), episode = server.asked[-1], server.asked[-1][1]["episode_id"]
    assert (path, key) == ("/reset", f"Bearer {KEY}")
    assert body == {"seed": 11, "task": 3, "answer": "7", "episode_id": episode}
    assert environment.step("a") == Step("1: a", 0.25, done=False)
    path, body, _ = server.asked[-1]
    assert (path, body) == ("/step", {"action": {"message": "a"}, "episode_id": episode, "timeout_s": 1.0})
    assert [environment.step(turn) for turn in "bc"] == [("2: a b", 0.5, False), ("3: a b c", 0.75, True)]
    with pytest.raises(ServerError, match=r"refuses the request: status 422: .*Bearer \*\*\*") as caught:
        environment.step("refuses")
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    "turn", ["fails once", "stalls once", "hangs up once", "lies once", "talks nonsense once", "floods once"]
)
def test_turn_with_lost_reply_is_applied_once(server: OpenEnvServer, turn: str) -> None:
    """The server took the turn. Under another id the episode has it once, after its earlier turns."""
    environment = started(server)
    environment.step("a")
    first = server.asked[-1][1]["episode_id"]
    assert environment.step(turn) == Step(f"2: a {turn}", 0.5, done=False)
    assert environment.step("c") == Step(f"3: a {turn} c", 0.75, done=True)
    last = server.asked[-1][1]["episode_id"]
    assert (server.said[first], server.said[last]) == (["a", turn], ["a", turn, "c"])


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ("is away", "the environment's server failed 2 times, at last: status 503: 'away'"),
        ("earns infinity", "at last: the reply to /step has no observation, reward and done"),
    ],
)
def test_a_server_without_an_answer_fails(server: OpenEnvServer, turn: str, message: str) -> None:
    with pytest.raises(ServerError, match=message):
        started(server).step(turn)


def test_a_server_that_answers_otherwise_later_fails(server: OpenEnvServer) -> None:
    environment = started(server)
    environment.step("is fickle")
    server.count["fails once"] = 0
    with pytest.raises(RuntimeError, match="the server is not deterministic"):
        environment.step("fails once")


def test_what_does_not_fit_is_named(server: OpenEnvServer) -> None:
    environment = OpenEnv(url=server.address, reset={"task": "colour"})
    with pytest.raises(ValueError, match=r"environment\.kwargs\.reset names colour, which the row does not have"):
        environment.reset(ROW)
    silent = OpenEnv(url=server.address, observation="prompt")
    assert silent.reset(replace(ROW, prompt="of the row")) == "of the row"
    with pytest.raises(ServerError, match="failed 1 times, at last: ConnectError"):
        OpenEnv(url="http://127.0.0.1:9", num_attempts=1).reset(ROW)


@pytest.mark.parametrize("url", ["http://[::1", "http://h\0"])
def test_an_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ServerError, match="the environment's server cannot be asked: Invalid"):
        OpenEnv(url=url).reset(ROW)


@pytest.mark.parametrize("truth", ["\ud800", math.nan])
def test_what_json_cannot_express_is_an_error(server: OpenEnvServer, truth: Any) -> None:
    environment = OpenEnv(url=server.address, reset={"truth": "ground_truth"})
    with pytest.raises(ServerError, match="the environment's server cannot be asked"):
        environment.reset(replace(ROW, ground_truth=truth))


def test_key_that_no_header_has_is_an_error(server: OpenEnvServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_LETTERS_KEY", "sésame")
    with pytest.raises(ServerError, match="the environment's server cannot be asked") as caught:
        OpenEnv(url=server.address, api_key_variable="OPENENV_LETTERS_KEY").reset(ROW)
    assert "sésame" not in str(caught.value)

"""A user's function is accepted if and only if the call of a reward works, and the check runs no file."""

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.rules import Rules
from megarl.rewards.signature import ARGUMENTS, IDS, Form, fault_in_file, fault_of, form_of

NAMES = [*ARGUMENTS, IDS, "prompt", "tokens"]


@st.composite
def parameters(draw: st.DrawFn) -> str:
    """Draw the parameters of a function, of every kind and in a valid order."""
    names = draw(st.permutations(NAMES))[: draw(st.integers(0, len(NAMES)))]
    cuts = sorted(draw(st.integers(0, len(names))) for _ in range(2))
    only, both, keyword = names[: cuts[0]], names[cuts[0] : cuts[1]], names[cuts[1] :]
    positional = [*only, *both]
    first_default = draw(st.integers(0, len(positional)))
    parts = [name if place < first_default else f"{name}=0" for place, name in enumerate(positional)]
    if only:
        parts.insert(len(only), "/")
    if draw(st.booleans()):
        parts.append("*args")
    elif keyword:
        parts.append("*")
    parts += [name + draw(st.sampled_from(["", "=0"])) for name in keyword]
    return ", ".join([*parts, *draw(st.sampled_from([[], ["**others"]]))])


@given(parameters())
def test_signature_is_accepted_exactly_if_call_works(tmp_path_factory: pytest.TempPathFactory, of: str) -> None:
    path = tmp_path_factory.getbasetemp() / "mine.py"
    path.write_text(f"def compute_score({of}): return 1.0\nraise AssertionError('the file is run')\n")
    function = eval(f"lambda {of}: 1.0")  # noqa: S307 - our own text
    names = (*ARGUMENTS, IDS) if form_of(function, "compute_score").takes_ids else ARGUMENTS
    try:
        works = function(**dict.fromkeys(names)) == 1.0
    except TypeError:
        works = False
    fault = fault_in_file(path, "compute_score")
    assert (fault is None) == works, of
    assert fault_of(function, path, "compute_score") == fault


CALL = "f(data_source=..., solution_str=..., ground_truth=..., extra_info=...)"


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (
            "def f(prompt, completion): ...",
            "f does not accept data_source, solution_str, ground_truth, extra_info as a",
        ),
        ("def f(prompt, **others): ...", f"f needs prompt, which is not given: the call is {CALL}; **kwargs accepts"),
        (
            "def f(solution_str, ground_truth, k): ...",
            "not accept data_source, extra_info as a keyword and needs k, which",
        ),
        ("def f(data_source, /, **others): ...", "f needs data_source, which is not given"),
        ("async def f(prompt, **others): ...", f"f needs prompt, which is not given: the call is {CALL}"),
        (
            "def f(solution_strs, k): ...",
            "f does not accept data_sources, ground_truths, extra_infos as a keyword and needs k, which is not given",
        ),
        ("class f: ...", "the class f has none of the methods __call__, compute_score, compute_score_batch: define"),
        (
            "class f:\n    def __init__(self, k): ...\n    def __call__(self, **_): ...",
            "constructor of f needs k: give",
        ),
        ("class f:\n    def __call__(self, text): ...", "f.__call__ does not accept data_source, solution_str"),
        ("class f:\n    async def compute_score(self, k, **_): ...", "f.compute_score needs k, which is not given"),
        ("class f:\n    def compute_score_batch(self, k): ...", "f.compute_score_batch does not accept data_sources"),
        ("def g(): ...\nimport os.path as h\nx, *y = 1, 2", "has no function 'f'; it has g, x, y"),
        ("", "has no function 'f'; it has none"),
        ("def f(", "fails to load: SyntaxError"),
        ("\0", "fails to load: "),
        ("(" * 10**5, "fails to load: "),
    ],
)
def test_signature_fault_is_equal_from_file_and_rank(source: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    found = fault_in_file(path, "f")
    assert found is not None and fault in found
    with pytest.raises(ValueError, match=r"^custom_reward_function\."):
        Rules(path=str(path), name="f").check()


@pytest.mark.parametrize(
    "source",
    [
        "from functools import cache\n@cache\ndef f(prompt): ...",
        "from judges import f",
        "from judges import *",
        "f = partial(g, 1)",
        "class f:\n    def __new__(cls, **others): ...\n    def __call__(self, **others): ...",
        "if fast:\n    def f(prompt): ...",
        "def f(prompt): ...\ndef f(**others): ...",
        "globals()['f'] = print",
        "def __getattr__(name): ...",
        "for f in judges: pass",
        "class f(Base): ...",
        "@dataclass\nclass f:\n    k: int\n    def __call__(self, **others): ...",
        "class f:\n    __call__ = compute_score = print",
    ],
)
def test_run_time_faults_are_left_to_ranks(source: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(source)
    assert fault_in_file(tmp_path / "mine.py", "f") is None


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("def f(**_): ...", Form()),
        ("async def f(solution_str, **_): ...", Form(is_async=True)),
        ("def f(solution_str, solution_ids, **_): ...", Form(takes_ids=True)),
        ("def f(solution_strs, solution_ids, **_): ...", Form(is_batch=True, takes_ids=True)),
        ("class f:\n    def __call__(self, *, solution_ids, **_): ...", Form(takes_ids=True)),
        ("def f(solution_strs, **_): ...", Form(is_batch=True)),
        (
            "def f(data_sources=None, solution_strs=None, ground_truths=None, extra_infos=None): ...",
            Form(is_batch=True),
        ),
        ("def compute_score_batch(**_): ...\nf = compute_score_batch", Form()),  # by its own name alone
        ("class f:\n    def compute_score_batch(self, **_): ...", Form(is_batch=True)),
        ("class f:\n    async def __call__(self, **_): ...\n    def compute_score(self): ...", Form(is_async=True)),
        ("class C:\n    async def __call__(self, **_): ...\nf = C()", Form(is_async=True)),
        ("class B:\n    async def compute_score(self, **_): ...\nclass f(B): ...", Form(is_async=True)),
        ("class f:\n    @staticmethod\n    def __call__(solution_strs, **_): ...", Form(is_batch=True)),
        ("from functools import partial\nasync def g(k, **_): ...\nf = partial(g, k=1)", Form(is_async=True)),
    ],
)
def test_a_reward_has_a_form(source: str, form: Form, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    assert fault_in_file(path, "f") is None
    assert Rules(path=str(path), name="f").check() == form


def test_extra_arguments_reach_function_or_constructor(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    for source, fault in (
        ("def f(k, **_): ...", None),
        ("def f(data_source, solution_str, ground_truth, extra_info): ...", "f does not accept k as a keyword"),
        ("class f:\n    def __init__(self, k): ...\n    def __call__(self, **_): ...", None),
        (
            "class f:\n    def __call__(self, **_): ...",
            "the constructor of f does not accept k, which custom_reward_function.reward_kwargs gives",
        ),
    ):
        path.write_text(source)
        found = fault_in_file(path, "f", ["k"])
        assert found is None if fault is None else found is not None and fault in found
        if fault is None:
            Rules(path=str(path), name="f", kwargs={"k": 1}).check()
        else:
            with pytest.raises(ValueError, match=fault):
                Rules(path=str(path), name="f", kwargs={"k": 1}).check()


def test_constructor_failure_is_named_and_check_constructs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("class f:\n    def __init__(self, k): 1 / k\n    def __call__(self, **_): ...")
    rules = Rules(path=str(path), name="f", kwargs={"k": 0})
    assert rules.check() == Form()
    with pytest.raises(ValueError, match=r"reward_kwargs: .*mine.py: f\(k=...\) fails: ZeroDivisionError: "):
        rules.load()


def test_a_rank_asks_the_function_itself(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    bodies = ("def g({}): return 1.0\nf = g", "class C:\n    def __call__(self, {}): ...\nf = C()")
    for body, works in product(bodies, (False, True)):
        path.write_text(body.format("**others" if works else "prompt"))
        assert fault_in_file(path, "f") is None
        if works:
            Rules(path=str(path), name="f").check()
        else:
            with pytest.raises(
                ValueError, match="f does not accept data_source.* and needs prompt, which is not given"
            ):
                Rules(path=str(path), name="f").check()
    path.write_text("f = max")  # C code without a signature
    Rules(path=str(path), name="f").check()

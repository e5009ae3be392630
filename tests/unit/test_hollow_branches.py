"""The lines for CUDA are found in the text of a file."""

import pytest

from tests.hollow.branches import all_branches, branches

CASES = {
    "if on_cuda():\n  a()\n  b()\nelse:\n  c()": [(3, 4)],
    "if not on_cuda():\n  return a()\nb()\nc()": [(4, 5)],
    "if not on_cuda():\n  a()\nb()": [],
    "if not on_cuda():\n  a()\nelse:\n  b()": [(5,)],
    "if x.is_cuda and y:\n  a()\nb()": [(3,)],
    "if x.is_cuda or y:\n  a()\nb()": [],
    "if not (y and on_cuda()):\n  return\na()": [(4,)],
    "if not (y or on_cuda()):\n  return\na()": [],
    "if y or not on_cuda():\n  return\na()": [(4,)],
    'if device.type == "cuda":\n  if y:\n    a()': [(3, 4)],
    'if device.type != "cuda":\n  raise a\nb()': [(4,)],
    'for x in y:\n  if device.type != "cuda":\n    continue\n  a()': [(5,)],
    "a(b if on_cuda() else c)": [(2,)],
    "return on_cuda() and x": [(2,)],
    "with a:\n  if on_cuda():\n    b()": [(4,)],
    "if x:\n  a()": [],
    "with torch.cuda.stream(x):\n  a()": [(2,)],
}
PRIVATE = """
def f(x):
  if on_cuda():
    return _first(
      x)
  return _g(x) if on_cuda() else _h(x)
def _first(x):
  'Text.'
  return _second(x)
def _second(x): pass
def _g(x): pass
def _h(x): pass
"""
LAUNCHER = """
def launch(x):
  'Text.'
  for y in x:
    kernel[1](y)
@triton.jit
def kernel(y):
  pass
"""


@pytest.mark.parametrize("body", CASES)
def test_the_lines_that_only_cuda_runs(body: str) -> None:
    text = "def f():\n" + "\n".join(f"  {line}" for line in body.splitlines())
    assert [branch.lines for branch in branches(text, "f.py")] == CASES[body]


def test_private_functions_of_cuda_lines_are_cuda_lines() -> None:
    found = {branch.function: branch.lines for branch in branches(PRIVATE, "f.py")}
    assert found == {"f": (6,), "_first": (9,), "_second": (10,)}


def test_what_launches_a_kernel_is_for_cuda() -> None:
    assert branches(LAUNCHER, "learner/other.py") == []
    [branch] = branches(LAUNCHER, "learner/kernels/f.py")
    assert (branch.function, branch.lines) == ("launch", (4, 5))


def test_deciding_packages_have_cuda_only_branches() -> None:
    assert {branch.file.partition("/")[0] for branch in all_branches()} >= {
        "learner",
        "rollout",
        "weight_sync",
        "reshard",
    }

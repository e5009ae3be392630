"""All replacements of other libraries' code; `make test-newest` runs these tests with the newest Megatron-Core."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megarl
from megarl.platform.patching import Patch, declare, declared, replace, replaced
from megarl.rollout.patches import prepare_environment

PACKAGE = Path(megarl.__file__).parent
FREE = {"platform/patching.py"}
SETTERS = {"setattr", "delattr", "patch", "patch.object", "patch.dict", "mock.patch", "monkeypatch.setattr"}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def calls_of(tree: ast.Module, name: str) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == name]


@pytest.fixture(scope="module")
def table() -> list[Patch]:
    for path, tree in trees():
        if any(calls_of(tree, name) for name in ("declare", "declare_megatron", "declare_vllm")):
            importlib.import_module(f"megarl.{path.removesuffix('.py').replace('/', '.')}")
    return [patch for patch in declared() if patch.library != "planted"]


def third_party(tree: ast.Module) -> set[str]:
    """Return the names in a module that are bound to other libraries' modules, classes and functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound = {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            bound = {alias.asname or alias.name: node.module or "" for alias in node.names}
        else:
            continue
        known = {*sys.stdlib_module_names, "megarl"}
        found |= {name for name, module in bound.items() if module.partition(".")[0] not in known}
    for node in ast.walk(tree):  # and of what is assigned from them: `resolver = module.Resolver`
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Name | ast.Attribute):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if ast.unparse(node.value).partition(".")[0] in found:
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def replacements(tree: ast.Module) -> Iterator[str]:
    """Yield the statements that set an attribute of other libraries' code without `replace`."""
    foreign = third_party(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Delete):
            targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
            parts = [part for target in targets for part in getattr(target, "elts", [target])]
            owners = {ast.unparse(part).partition(".")[0] for part in parts if isinstance(part, ast.Attribute)}
            if owners & foreign:
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in SETTERS:
            yield ast.unparse(node)


def test_patches_were_tested_with_installed_versions(table: list[Patch]) -> None:
    installed = [patch for patch in table if patch.installed_version]
    assert {patch.library for patch in installed} >= {"megatron-core", "torch", "vllm", "math-verify"}
    assert [f"{patch} ({patch.library} {patch.installed_version})" for patch in installed if not patch.is_tested] == []


def test_every_replacement_of_library_code_is_in_table() -> None:
    assert {
        path: list(replacements(tree)) for path, tree in trees() if path not in FREE and any(replacements(tree))
    } == {}


def test_replacements_live_in_the_folder_of_their_library(table: list[Patch]) -> None:
    for path, tree in trees():
        assert path.startswith("learner/patches/") or not calls_of(tree, "declare_megatron")
        assert path.startswith("rollout/patches/") or not calls_of(tree, "declare_vllm")
    assert {patch.library for patch in table if patch.owner.startswith("megatron.")} == {"megatron-core"}
    assert {patch.library for patch in table if patch.owner.startswith("vllm.")} == {"vllm"}


def test_what_is_replaced_exists(table: list[Patch]) -> None:
    gone = {"te_general_gemm", "_mla_fused_linear_or_default", "save_common"}  # each in one of the supported releases
    prepare_environment()  # vLLM reads it when it is imported
    for owner in ("megatron.", "vllm."):
        replaced_there = [patch for patch in table if patch.owner.startswith(owner) and not gone & set(patch.names)]
        assert len(replaced_there) >= 10
        assert [str(patch) for patch in replaced_there if not patch.is_present] == []


def test_patch_table_imports_no_patched_library() -> None:
    code = "import sys, megarl.learner.patches, megarl.rollout.patches; print({'megatron', 'vllm'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("import torch\ntorch.zeros = None", True),
        ("from megatron.core import x\nx.y.z, a = 1, 2", True),
        ("import torch\nalias: Any = torch.Tensor\nalias.cuda = None", True),
        ("setattr(x, name, None)", True),
        ("import torch\nx = torch.zeros(1)\nx.grad = None", False),
        ("import sys\nsys.stdout = None", False),
    ],
)
def test_a_planted_replacement_is_found(code: str, is_found: bool) -> None:
    assert any(replacements(ast.parse(code))) == is_found


def planted(*names: str, owner: str = __name__) -> Patch:
    about = {"library": "planted", "versions": ">=1", "reason": "", "upstream": "", "until": ""}
    return declare(owner, *names, **about)


def test_a_replacement_does_not_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = SimpleNamespace(double=lambda x: 2 * x)
    monkeypatch.setattr(Patch, "find_owner", lambda self: owner)
    patch = planted("double", owner="replaced for good")
    for _ in range(3):
        original = patch.original("double")
        replace(patch, double=lambda x, original=original: original(x) + 1)
    assert owner.double(4) == 9


def test_a_block_restores_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Base:
        def name(self) -> str:
            return "base"

    class Child(Base):
        def own(self) -> str:
            return "own"

    monkeypatch.setattr(Patch, "find_owner", lambda self: Child)
    patch, child = planted("name", "own", "new"), Child()
    for on in (None, child):
        before = dict(vars(on or Child))
        with pytest.raises(ZeroDivisionError), replaced(patch, on=on, name=1, own=2, new=3):
            assert (child.name, child.own, child.new) == (1, 2, 3)  # type: ignore[attr-defined]
            _ = 1 / 0
        assert dict(vars(on or Child)) == before
    assert (child.name(), child.own()) == ("base", "own")


def test_an_unknown_library_is_not_tested() -> None:
    assert planted("x").installed_version is None and not planted("x").is_tested


def test_batched_gradient_clipping_equals_separate_clipping() -> None:
    from megatron.core.utils import local_multi_tensor_scale

    from megarl.learner.patches.optimizer import CLIPPING, clip_gradients_at_once

    gradients = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (1, 7, 64)]
    with replaced(CLIPPING, **{name: CLIPPING.original(name) for name in CLIPPING.names}):
        clip_gradients_at_once()
        clipping = CLIPPING.find_owner()
        norm, none = clipping.l2_norm_impl(0, None, [gradients], False)
        assert none is None
        torch.testing.assert_close(norm, torch.cat(gradients).norm()[None])
        ours, theirs = ([gradient.clone() for gradient in gradients] for _ in range(2))
        clipping.multi_tensor_scale_impl(0, None, [ours, ours], 0.3)
        local_multi_tensor_scale(0, None, [theirs, theirs], 0.3)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)

"""The types that vLLM declares for its arguments, read from its source, as far as they are built from Python's own."""

import ast
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

PLAIN: dict[str, object] = {"bool": bool, "int": int, "float": float, "str": str}
HOLDING: dict[str, Any] = {"list": list, "set": list, "dict": dict, "Literal": Literal}  # YAML has lists, no sets


def mismatch(name: str, value: object, declared: ast.expr) -> Iterator[str]:
    """Yield why `value` is no value of the argument `name`, if it is none."""
    try:
        TypeAdapter(_type(declared)).validate_python(value, strict=True)
    except ValidationError:
        yield f"{name} takes {ast.unparse(declared)}, not {type(value).__name__}: correct its value"


def allows_false(declared: ast.expr) -> bool:
    """Return whether an argument is declared as a switch."""
    return any(isinstance(node, ast.Name) and node.id == "bool" for node in ast.walk(declared))


def _type(node: ast.expr) -> Any:
    """Return the type that an annotation means; a type of vLLM's own may be anything."""
    match node:
        case ast.Constant(value=None):
            return NoneType
        case ast.Constant(value=str(text)):
            return _type(ast.parse(text, mode="eval").body)
        case ast.Name(id=name) if name in PLAIN | HOLDING and name != "Literal":
            return (PLAIN | HOLDING)[name]
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            one = _type(left)
            other = _type(right)
            return Any if Any in (one, other) else one | other
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            return Literal[ast.literal_eval(inner)]
        case ast.Subscript(value=ast.Name(id=name), slice=inner) if name in HOLDING:
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return HOLDING[name][tuple(_type(part) for part in parts)]
        case _:
            return Any

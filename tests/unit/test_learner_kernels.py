"""The learner's Triton kernels: the interpreter agrees with torch, and the compiler builds them for Hopper."""

from typing import Any

import pytest

from megarl.learner.kernels import norm, rotary, softmax
from tests.support.programs import run_python

SIGNATURES: dict[str, dict[str, str]] = {
    "moments_of_row": {
        "logits": "*fp32",
        "stride": "i32",
        "targets": "*i64",
        "found": "*fp32",
        "num_rows": "i32",
        "num_columns": "i32",
        "with_entropy": "constexpr",
        "block": "constexpr",
    },
    "gradient_of_block": {
        "logits": "*fp32",
        "stride": "i32",
        "grad": "*bf16",
        "targets": "*i64",
        "normalizers": "*fp32",
        "grad_log_probs": "*fp32",
        "entropies": "*fp32",
        "grad_entropies": "*fp32",
        "num_columns": "i32",
        "with_entropy": "constexpr",
        "block": "constexpr",
    },
    "normalised_rows": {
        **{"x": "*bf16", "stride": "i32", "weight": "*bf16", "out": "*bf16", "scale": "*fp32"},
        **{"num_rows": "i32", "num_columns": "i32", "eps": "fp32", "tile": "constexpr", "width": "constexpr"},
    },
    "gradient_rows": {
        **{"x": "*bf16", "of_out": "*bf16", "stride": "i32", "of_out_stride": "i32", "weight": "*bf16"},
        **{"scale": "*fp32", "of_x": "*bf16", "of_weight": "*fp32", "num_programs": "i32", "num_rows": "i32"},
        **{"num_columns": "i32", "tile": "constexpr", "width": "constexpr"},
    },
    "rotated_token": {
        **{"x": "*bf16", "token_stride": "i32", "head_stride": "i32", "cosines": "*bf16", "sines": "*bf16"},
        **{"out": "*bf16", "from_step": "i32", "from_gap": "i32", "to_step": "i32", "to_gap": "i32"},
        **{"num_heads": "i32", "head_dim": "i32", "num_pairs": "i32"},
        **{"heads_block": "constexpr", "pairs_block": "constexpr", "rest_block": "constexpr"},
    },
}
COMPILED: list[tuple[Any, dict[str, int]]] = [
    *(
        (kernel, {"block": softmax.BLOCK, "with_entropy": with_entropy})
        for kernel in (softmax.moments_of_row, softmax.gradient_of_block)
        for with_entropy in (True, False)
    ),
    *(
        (kernel, {"tile": tile, "width": width})
        for kernel in (norm.normalised_rows, norm.gradient_rows)
        for tile, width in ((32, 128), (1, 8192))
    ),
    *(
        (rotary.rotated_token, {"heads_block": heads, "pairs_block": pairs, "rest_block": rest})
        for heads, pairs, rest in ((16, 64, 1), (1, 32, 1), (128, 32, 64))
    ),
]


def test_kernels_and_torch_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run_python("-m", "tests.support.interpreted", timeout_s=200).endswith("88 cases agree\n")


@pytest.mark.parametrize(
    ("kernel", "constants"), COMPILED, ids=[f"{kernel.__name__}-{constants}" for kernel, constants in COMPILED]
)
def test_a_kernel_compiles_for_hopper(kernel: Any, constants: dict[str, int]) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=kernel, signature=SIGNATURES[kernel.__name__], constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]

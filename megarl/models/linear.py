"""The sizes of linear attention by a gated delta rule, in a `config.json`, and the layers that have it."""

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.models.families import Family
from megarl.models.fields import MOST_LAYERS, Fields, wrong
from megarl.models.windows import FULL, LINEAR
from megarl.platform.errors import UserError
from megarl.reshard.headers import Shape

CHUNK = 64  # tokens that the trainer computes at once
PREFIX = "linear_attn."  # of the names of parameters
CONVOLUTION = {"conv1d": ("q", "k", "v")}
"""The sections of the convolution's weight, as in `Family.linear_sections`."""


@dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """The sizes of linear attention (Gated DeltaNet). A key head and its value heads are a group; groups are alike.

    The projections give queries `q`, keys `k`, values `v` with gates `z`, and of value heads strengths `b` and decays
    `a`. A section of a parameter has rows of one kind, group after group. If it has several kinds, the rows of a group
    are together.
    """

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int  # of a head
    conv_width: int  # tokens that the convolution before queries, keys and values sees

    @property
    def group_size(self) -> int:
        """The value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def value_size(self) -> int:
        """The numbers of all values of a token."""
        return self.num_value_heads * self.value_dim

    @property
    def memory_size(self) -> int:
        """The numbers that a layer keeps of a sequence: matrices, and the last tokens of the convolution."""
        return self.value_size * self.key_dim + (self.conv_width - 1) * self.size("qkv")

    @property
    def exchanged_size(self) -> int:
        """The numbers of a token that context-parallel ranks exchange in a layer: projections, and what was read."""
        return self.size("qkvzba") + self.value_size

    def rows(self, kinds: str) -> int:
        """Return the numbers that one group has of some kinds, such as `qkvz`."""
        of_values = self.group_size * self.value_dim
        sizes = {"q": self.key_dim, "k": self.key_dim, "v": of_values, "z": of_values}
        return sum(sizes.get(kind, self.group_size) for kind in kinds)

    def size(self, kinds: str) -> int:
        """Return the numbers that all groups have of some kinds."""
        return self.num_key_heads * self.rows(kinds)


def read_linear(config: Fields, family: Family) -> LinearAttention | None:
    """Return the linear attention of a family that has any. Raises UserError if a size is missing or impossible."""
    if not family.linear_sections:
        return None
    names = {
        "num_key_heads": "linear_num_key_heads",
        "num_value_heads": "linear_num_value_heads",
        "key_dim": "linear_key_head_dim",
        "value_dim": "linear_value_head_dim",
        "conv_width": "linear_conv_kernel_dim",
    }
    linear = LinearAttention(layers=_layers(config), **{field: config.size(key) for field, key in names.items()})
    if linear.num_value_heads % linear.num_key_heads:
        raise UserError(
            f"config.json: linear_num_value_heads {linear.num_value_heads} does not divide by linear_num_key_heads "
            f"{linear.num_key_heads}"
        )
    return linear


def _layers(config: Fields) -> tuple[int, ...]:
    num_layers = config.size("num_hidden_layers", most=MOST_LAYERS)
    every = config.size("full_attention_interval", 4)
    usual = [LINEAR if (layer + 1) % every else FULL for layer in range(num_layers)]
    kinds = config.items("layer_types") or usual
    if len(kinds) != num_layers or FULL not in kinds or not {*map(str, kinds)} <= {LINEAR, FULL}:
        remedy = f"must have {LINEAR} or {FULL} for each of the {num_layers} layers, and at least one {FULL}"
        raise wrong("layer_types", kinds, remedy)
    return tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)


def linear_shapes(
    linear: LinearAttention, sections: Mapping[str, tuple[str, ...]], hidden_size: int
) -> dict[str, Shape]:
    """Return the shapes of a layer's parameters, by name after the layer's prefix."""
    shapes: dict[str, Shape] = {
        f"{PREFIX}{name}.weight": (linear.size("".join(kinds)), hidden_size) for name, kinds in sections.items()
    }
    return shapes | {
        f"{PREFIX}conv1d.weight": (linear.size("qkv"), 1, linear.conv_width),
        f"{PREFIX}dt_bias": (linear.num_value_heads,),
        f"{PREFIX}A_log": (linear.num_value_heads,),
        f"{PREFIX}norm.weight": (linear.value_dim,),
        f"{PREFIX}out_proj.weight": (hidden_size, linear.value_size),
    }

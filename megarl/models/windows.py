"""The window of attention in a `config.json`: the tokens that a query sees, and the layers that have the window."""

from megarl.models.families import Family
from megarl.models.fields import LONGEST, MOST_LAYERS, Fields, wrong
from megarl.platform.errors import UserError

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"


def window_of(config: Fields, family: Family) -> tuple[int | None, tuple[int, ...]]:
    """Return the tokens that a query sees, itself included, and the layers with this window; None and () without one.

    Raises:
        UserError: the engine or transformers has no window in this family or layer.
    """
    window = config.size("sliding_window") if _is_on(config) else None
    kinds = config.items("layer_types")
    known = [FULL, *[SLIDING] * bool(window), *[LINEAR] * bool(family.linear_sections)]
    others = [kind for kind in kinds if kind not in known]
    if others:
        raise wrong("layer_types", others[:1], f"must be {FULL}, or {SLIDING} with a sliding_window")
    num_layers = config.size("num_hidden_layers", most=MOST_LAYERS)
    if family.windows in ("some layers", "every other layer"):
        return _some_layers(config, family, window, num_layers)
    if window is None or window >= config.size("max_position_embeddings", most=LONGEST):
        return None, ()
    if family.windows == "refused":
        raise UserError(f"config.json: sliding_window {window}: attention is full in this family; null turns it off")
    if FULL in kinds:
        raise wrong("layer_types", kinds, "every layer of this family has the window; remove the key")
    return window, tuple(range(num_layers))


def _is_on(config: Fields) -> bool:
    """Return whether a window counts: Qwen alone has a switch, and the engine uses the window of every other family."""
    has_switch = str(config.values["model_type"]).startswith("qwen")
    return "sliding_window" in config and (config.flag("use_sliding_window") or not has_switch)


def _some_layers(
    config: Fields, family: Family, window: int | None, num_layers: int
) -> tuple[int | None, tuple[int, ...]]:
    every = config.size("sliding_window_pattern", family.full_every)
    usual = [SLIDING if (layer + 1) % every else FULL for layer in range(num_layers)]
    kinds = config.items("layer_types") or usual
    if len(kinds) != num_layers:
        raise wrong("layer_types", kinds, f"must have one kind for each of the {num_layers} layers")
    if family.windows == "every other layer" and kinds != usual:
        raise wrong("layer_types", kinds, f"must be {SLIDING} and {FULL} in turn in this family")
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING)
    if layers and window is None:
        raise UserError("config.json: there is no sliding_window, and some layers of this family have one")
    return window, layers

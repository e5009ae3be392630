"""The `quantization_config` of compressed-tensors: the forms with weights in FP8 that are read here."""

from collections.abc import Iterator, Mapping

METHOD = "compressed-tensors"
GROUPS = "config_groups"
BLOCK = "block_structure"
Values = Mapping[str, tuple[object, ...]]

FIXED: Values = {
    "format": ("float-quantized",),
    "kv_cache_scheme": (None,),
    "quantization_status": (None, "compressed"),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
}
OF_GROUP: Values = {"format": (None, "float-quantized"), "output_activations": (None,)}
OF_ACTIVATIONS: Values = {"dynamic": (True,)}  # without scales in the files
OF_WEIGHTS: Values = {
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("channel", "block"),
    "symmetric": (None, True),
    "dynamic": (None, False),
    "group_size": (None,),
    "actorder": (None,),
}
"""Keys, and the values that leave a weight the product of its number and its scale; None: the key may be missing."""
UNREAD = ("quant_method", "global_compression_ratio", "ignore", "run_compressed", "version", GROUPS)


def compressed_faults(declared: Mapping[str, object]) -> Iterator[str]:
    """Yield each part of a `quantization_config` of compressed-tensors that is not read here."""
    yield from _other_values(declared, FIXED, "")
    for key in sorted(declared.keys() - {*FIXED, *UNREAD}):
        yield f"{key} is not known here"
    groups = declared.get(GROUPS)
    if not isinstance(groups, dict) or not groups:
        yield f"{GROUPS} {groups!r:.60}: must be an object of groups"
        return
    for name, group in groups.items():
        where = f"{GROUPS}.{name}"
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            yield f"{where} {group!r:.60}: must say how weights are stored"
            return
        yield from _other_values(group, OF_GROUP, f"{where}.")
        yield from _other_values(weights, OF_WEIGHTS, f"{where}.weights.")
        activations = group.get("input_activations")
        if isinstance(activations, dict):
            yield from _other_values(activations, OF_ACTIVATIONS, f"{where}.input_activations.")
        if weights.get("strategy") == "block" and not is_size(weights.get(BLOCK)):
            yield f"{where}.weights.{BLOCK} {weights.get(BLOCK)!r:.60}: must be rows and columns of a block"
    if len({_size_of(group["weights"]) for group in groups.values()}) > 1:
        yield f"{GROUPS}: all groups must have scales of the same parts"


def compressed_size(declared: Mapping[str, object]) -> tuple[int, int | None]:
    """Return the rows and columns that share a scale, given a configuration without faults; None: all columns."""
    groups = declared[GROUPS]
    assert isinstance(groups, dict)
    return _size_of(next(iter(groups.values()))["weights"])


def is_size(size: object) -> bool:
    """Return whether a value is the rows and columns of a block."""
    return isinstance(size, list) and len(size) == 2 and all(type(each) is int and each > 0 for each in size)


def _size_of(weights: Mapping[str, object]) -> tuple[int, int | None]:
    size = weights.get(BLOCK)
    if weights.get("strategy") == "block" and isinstance(size, list) and is_size(size):
        return size[0], size[1]
    return 1, None


def _other_values(values: Mapping[str, object], allowed: Values, where: str) -> Iterator[str]:
    for key, known in allowed.items():
        if values.get(key) not in known:
            words = " or ".join(repr(value) for value in known)
            yield f"{where}{key} {values.get(key)!r:.60}: must be {words}"

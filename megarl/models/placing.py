"""The step from the holdings of a layer's cuts to the holdings of the ranks that have these cuts."""

from collections.abc import Mapping, Sequence
from itertools import chain

from megarl.reshard.layout import PlacedBox, Placement, ShardedBoxes


def placed(cuts: Placement, ranks: Sequence[Sequence[int]]) -> dict[str, ShardedBoxes]:
    """Return the placement that gives the ranks `ranks[cut]` everything that `cuts` gives to number `cut`.

    Parameters that share a holding in `cuts` share a holding in the result.
    """
    known: dict[ShardedBoxes, ShardedBoxes] = {}
    for boxes in cuts.values():
        if boxes not in known:
            places = []
            for place in boxes.places:
                of_cuts = chain.from_iterable(ranks[cut] for cut in place.ranks)
                places.append(PlacedBox(place.box, tuple(sorted(of_cuts))))
            known[boxes] = ShardedBoxes(tuple(places), boxes.dtype)
    return {name: known[boxes] for name, boxes in cuts.items()}


def behind(prefix: str, boxes: Mapping[str, ShardedBoxes]) -> dict[str, ShardedBoxes]:
    """Return the holdings whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): boxes for name, boxes in boxes.items() if name.startswith(prefix)}

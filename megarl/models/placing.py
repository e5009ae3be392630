"""The step from the holdings of a layer's cuts to the holdings of the ranks that have these cuts."""

from collections.abc import Mapping, Sequence

from megarl.reshard.layout import Holding, Place, Placement


def placed(cuts: Placement, ranks: Sequence[Sequence[int]]) -> dict[str, Holding]:
    """Return the placement that gives the ranks `ranks[cut]` everything that `cuts` gives to number `cut`.

    Parameters that share a holding in `cuts` share a holding in the result.
    """
    known: dict[Holding, Holding] = {}
    for holding in cuts.values():
        if holding not in known:
            places = (
                Place(place.box, tuple(sorted(rank for cut in place.ranks for rank in ranks[cut])))
                for place in holding.places
            )
            known[holding] = Holding(tuple(places), holding.dtype)
    return {name: known[holding] for name, holding in cuts.items()}


def behind(prefix: str, holdings: Mapping[str, Holding]) -> dict[str, Holding]:
    """Return the holdings whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): holding for name, holding in holdings.items() if name.startswith(prefix)}

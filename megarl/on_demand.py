"""A sequence that makes an item if it is asked for."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar, overload

Item_co = TypeVar("Item_co", covariant=True)


class OnDemand(Sequence[Item_co]):
    """A sequence that makes an item if it is asked for. It equals every sequence of equal items."""

    @abstractmethod
    def make_item(self, place: int) -> Item_co:
        """Return the item of a place, counted from 0."""

    @overload
    def __getitem__(self, place: int) -> Item_co: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Item_co]: ...
    def __getitem__(self, place: int | slice) -> Item_co | Sequence[Item_co]:
        places = range(len(self))[place]
        return self.make_item(places) if isinstance(places, int) else tuple(map(self.make_item, places))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return repr(tuple(self))

"""The result of a conversion: keys of megarl, and comments on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.commands.convert.expand import UNKNOWN, known_name
from megarl.config.foreign import Remark
from megarl.config.load import merged

_NAMES = ("trainer.experiment_name", "trainer.project_name", "trainer.default_local_dir")
"""Keys that name the run and its directory. Scripts add the output of a program, such as a date."""
_LACKS = "lacks the output of a program: a run whose name has the time never resumes"


@dataclass(kw_only=True)
class Converted:
    """A configuration, and the comments on it."""

    leaves: dict[str, Any] = field(default_factory=dict)  # by dotted key
    comments: dict[str, str] = field(default_factory=dict)  # by key of `leaves`
    dropped: dict[str, str] = field(default_factory=dict)  # a written key with its value -> why it changes nothing
    decisions: dict[str, str] = field(default_factory=dict)  # a key with its value -> what there is to decide
    remarks: list[Remark] = field(default_factory=list)  # on keys of verl

    def named(self, key: str | None, text: str) -> str:
        """Return the text of a key; if it names the run, without the output of programs, as a comment says."""
        name = known_name(text) if key in _NAMES and UNKNOWN in text else None
        if key is None or name is None:
            return text
        self.comments[key] = _LACKS
        return name

    def keep(self, leaves: Mapping[str, object], remarks: Sequence[Remark]) -> None:
        """Add keys of megarl, which override those before, and what is said about them."""
        for key, value in leaves.items():
            self.leaves[key] = merged(self.leaves.get(key), value)
        self.remarks += remarks
        for remark in remarks:
            if remark.key:
                was = f"was {remark.written}" if remark.written != remark.key else ""
                comments = (self.comments.get(remark.key), was, remark.why)
                self.comments[remark.key] = "; ".join(dict.fromkeys(filter(None, comments)))
            else:
                self.dropped[f"{remark.written}={remark.value}"] = remark.why

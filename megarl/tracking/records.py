"""The kinds of records that are sent to MLflow, as they wait in a file of JSON lines."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic refuses that of typing before Python 3.12


class DataFiles(TypedDict):
    """The files of one purpose that a run reads."""

    name: str
    digest: str  # of their paths, sizes and times
    context: str  # training or validation
    paths: list[str]


@dataclass(frozen=True, kw_only=True)
class _Opening:
    project: str
    experiment: str
    artifacts: str | None
    params: list[tuple[str, str]]
    start: str
    tags: dict[str, str]
    time: int
    data: list[DataFiles] = field(default_factory=list)
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Open(_Opening):
    kind: Literal["open"]


@dataclass(frozen=True, kw_only=True)
class _Resume(_Opening):
    kind: Literal["resume"]
    step: int
    same_curve: bool


@dataclass(frozen=True, kw_only=True)
class _Metrics:
    kind: Literal["metrics"]
    step: int
    time: int
    values: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class _Table:
    kind: Literal["table"]
    step: int
    file: str
    columns: dict[str, list[Any]]


@dataclass(frozen=True, kw_only=True)
class _End:
    kind: Literal["end"]
    time: int
    status: str
    summary: str


@dataclass(frozen=True, kw_only=True)
class _Files:
    kind: Literal["files"]
    paths: list[str]


_Record = Annotated[_Open | _Resume | _Metrics | _Table | _Files | _End, Field(discriminator="kind")]
_RECORD: TypeAdapter[Any] = TypeAdapter(_Record)


def is_record(row: dict[str, Any]) -> bool:
    """Return whether an object that was read from JSON is a record."""
    try:
        _RECORD.validate_python(row, extra="forbid")
    except ValidationError:
        return False
    return True

"""The findings of a check, of a machine or of hosts, and the table that shows them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table

from megarl.platform.screen import Screen, plain

Verdict = Literal["good", "note", "fault"]


@dataclass(frozen=True)
class Finding:
    """A row of the table: the subject, the finding and, unless all is well, advice."""

    name: str
    found: str
    advice: str = ""
    verdict: Verdict = "good"
    command: str = ""
    """The remedy as a command line, which is printed below the table so that no cell breaks it."""


def show(title: str, sections: Sequence[Sequence[Finding]]) -> None:
    """Print findings as a table, and below it their commands, each on a line of its own."""
    table = Table("what", "found", "advice", title=title)
    styles = {"good": "", "note": "yellow", "fault": "bold red"}
    for section in sections:
        for finding in section:
            table.add_row(finding.name, finding.found, finding.advice, style=styles[finding.verdict])
        table.add_section()
    console = Screen()
    console.print(table)
    for section in sections:
        for finding in section:
            if finding.command:
                console.print(plain(f"{finding.name}:\n  {finding.command}"), soft_wrap=True)

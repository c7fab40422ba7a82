"""A part's figures as a table: in Markdown, in CSV, and on the terminal."""

import csv
import io
from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table as RichTable

Value = str | int | float | None


class Table(NamedTuple):
    """Columns and rows; the first column names the row. Numbers keep all their digits in CSV."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]

    def markdown(self) -> str:
        """A heading and the table."""
        lines = [self.columns, ["---"] * len(self.columns), *map(self._shown, self.rows)]
        text = "".join(
            f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines
        )
        return f"## {self.title}\n\n{text}"

    def csv(self) -> str:
        """With the columns' names as the first line."""
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows([self.columns, *self.rows])
        return file.getvalue()

    def rich(self) -> RichTable:
        """For a terminal."""
        table = RichTable(*self.columns, title=self.title)
        for row in self.rows:
            table.add_row(*self._shown(row))
        return table

    @staticmethod
    def _shown(row: Sequence[Value]) -> list[str]:
        return [show(value) for value in row]


def show(value: Value) -> str:
    """A figure with four digits; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10000 else f"{value:,.0f}"
    return str(value)

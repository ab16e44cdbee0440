"""Tables in HTML, for notebooks."""

from collections.abc import Mapping, Sequence
from html import escape


def table(title: str, heads: Sequence[str], columns: Sequence[Mapping[str, str]]) -> str:
    """An HTML table with a row for each key of any column, in order of first occurrence; heads: the column titles."""
    rows = dict.fromkeys(key for column in columns for key in column)
    top = "".join(f"<th>{escape(head)}</th>" for head in ("", *heads))
    body = "".join(
        f"<tr><th style='text-align:left'>{escape(row)}</th>"
        + "".join(f"<td style='text-align:left'>{escape(column.get(row, '-'))}</td>" for column in columns)
        + "</tr>"
        for row in rows
    )
    return (
        f"<table><caption>{escape(title)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    )

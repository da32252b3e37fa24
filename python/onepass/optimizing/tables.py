"""HTML tables of the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Markup(str):
    """Text that is HTML already."""


def table(head: Sequence[str], rows: Iterable[tuple[Sequence[str], str]], numeric: Sequence[int] = ()) -> str:
    """Rows are cells and the class of the row; cells are escaped unless they are Markup."""

    def cells(tag: str, values: Sequence[str]) -> str:
        kinds = (' class="number"' if i in numeric else "" for i in range(len(values)))
        return "".join(f"<{tag}{kind}>{_html(v)}</{tag}>" for kind, v in zip(kinds, values, strict=True))

    top = f"<thead><tr>{cells('th', head)}</tr></thead>" if head else ""
    body = "".join(f'<tr class="{kind}">{cells("td", values)}</tr>' for values, kind in rows)
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def _html(value: str) -> str:
    return value if isinstance(value, Markup) else escape(value)

"""The frame of the report: one HTML file that needs nothing else, in light and in dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["card", "page", "section", "table"]

_STYLE = """
:root{--paper:#f6f7f9;--panel:#fff;--ink:#1c2330;--muted:#5c6675;--line:#dfe3e9;--accent:#2f6fde;
--c0:#2f6fde;--c1:#e07b39;--c2:#2a9d6e;--c3:#b2479e;--c4:#c79a12;--c5:#5b5fc7;--c6:#1597a5;
--c7:#d0484f;--ref:#8a94a3}
@media(prefers-color-scheme:dark){:root{--paper:#12161d;--panel:#1a2029;--ink:#e6eaf0;
--muted:#98a3b3;--line:#2b3442;--accent:#74a5ff;--c0:#74a5ff;--c1:#f2a066;--c2:#5fcf9f;--c3:#dd86cc;
--c4:#e3bf4f;--c5:#9a9df2;--c6:#5cc7d3;--c7:#f08489;--ref:#7d8797}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1200px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:24px;margin:0}h2{font-size:17px;margin:34px 0 12px}
.sub{color:var(--muted);margin:4px 0 22px}
.badge{font-size:12px;font-weight:600;padding:3px 9px;border-radius:99px;vertical-align:middle;
margin-left:10px;border:1px solid currentColor;color:var(--c1)}.badge.done{color:var(--c2)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(180px,1fr));gap:12px}
.card,figure,.panel{background:var(--panel);border:1px solid var(--line);border-radius:10px}
.card{padding:14px 16px}.card b{display:block;font-size:22px;line-height:1.25}
.card span{color:var(--muted);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:14px}
figure{margin:0;padding:14px 16px}figcaption{font-weight:600;margin-bottom:8px}
svg{width:100%;height:auto;display:block}
.tick{fill:var(--muted);font-size:11px}.grid{stroke:var(--line);stroke-width:1}
.axis{stroke:var(--muted);stroke-width:1}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.line.ref{stroke:var(--ref);stroke-dasharray:5 4;stroke-width:1.4}.fill.ref{fill:var(--ref)}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin-top:8px;color:var(--muted);font-size:12.5px}
.swatch{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px}
.swatch.ref{background:var(--ref)}
.panel{overflow-x:auto;padding:6px 0}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th,td{text-align:left;padding:6px 16px;border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}th{color:var(--muted);font-weight:600;white-space:nowrap}
td:first-child{white-space:nowrap}
td.num,th.num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
img.samples{display:block;max-width:100%;height:auto;border-radius:6px;margin:10px auto}
pre{margin:0;padding:10px 16px;font:12.5px/1.5 ui-monospace,Menlo,Consolas,monospace}
summary{cursor:pointer;padding:6px 16px;color:var(--muted)}
""" + "".join(
    f".line.c{k}{{stroke:var(--c{k})}}.fill.c{k}{{fill:var(--c{k})}}"
    f".swatch.c{k}{{background:var(--c{k})}}"
    for k in range(8)
)


def page(title: str, subtitle: str, badge: str, is_done: bool, sections: Sequence[str]) -> str:
    """The whole file.

    Args:
        title: the heading.
        subtitle: a line below it.
        badge: the run's state, in a word.
        is_done: whether that is a good one.
        sections: HTML, in order; empty ones are left out.
    """
    kind = "badge done" if is_done else "badge"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>{escape(title)}<span class="{kind}">{escape(badge)}</span></h1>'
        f'<p class="sub">{escape(subtitle)}</p>{"".join(sections)}</main></body></html>\n'
    )


def section(title: str, body: str) -> str:
    """A heading and what is under it; nothing if nothing is."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def card(name: str, value: str, detail: str) -> str:
    """A figure worth a glance."""
    return (
        f'<div class="card"><span>{escape(name)}</span><b>{escape(value)}</b>'
        f"<span>{escape(detail)}</span></div>"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], num_from: int | None = None) -> str:
    """A table of plain text.

    Args:
        header: names of the columns.
        rows: cells, as many as names.
        num_from: the column from which on cells are numbers, set flush right; None for none.

    Returns:
        HTML; empty if there are no rows.
    """
    if not rows:
        return ""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=num' if num_from is not None and column >= num_from else ''}>"
            f"{escape(cell)}</{tag}>"
            for column, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="panel"><table><tr>{cells("th", header)}</tr>{body}</table></div>'

"""A page with the charts of a simulation: units in use and waits over time, by instance and policy."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.util import find_spec

from leasehold.errors import NotReady

from assigner.simulation.charts import POINTS, largest, units_in_use, waits
from assigner.simulation.records import Records

#: Colours that also people with a weak sense of them tell apart (M. Okabe, K. Ito, "Color universal design", 2008).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999", "#000000")
_STYLE = """
h1 { font-size: 1.6rem }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1d2430 }
pre { overflow-x: auto; background: #f4f5f7; padding: 1rem; border-radius: 6px }
figure { margin: 1.5rem 0; overflow-x: auto } svg { width: 100%; min-width: 40rem; height: auto }
"""


def require() -> None:
    """Raise NotReady if the library that draws charts is not installed."""
    if find_spec("pygal") is None:
        raise NotReady("Charts need a library: pip install 'leasehold[plots]'.")


def page(title: str, text: str, runs: Mapping[str, Records]) -> str:
    """Return a page of HTML with this text and the charts of each run. It loads nothing from anywhere."""
    parts = [f"<h1>{escape(title)}</h1>", f"<pre>{escape(text)}</pre>"]
    names = largest(runs.values())
    top = max((records.units for records in runs.values()), default=1)
    for name, records in runs.items():
        parts.append(f"<h2>{escape(name)}</h2>")
        parts.append(_chart("units in use", records, units_in_use(records, names), stacked=True, top=top))
        parts.append(_chart("95 % of the waits of jobs that start then, seconds", records, waits(records, names)))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _chart(
    title: str,
    records: Records,
    lines: Mapping[str, Sequence[float | None]],
    *,
    stacked: bool = False,
    top: float | None = None,
) -> str:
    import pygal  # type: ignore[import-untyped]
    from pygal.style import DefaultStyle  # type: ignore[import-untyped]

    style = DefaultStyle(
        colors=COLOURS, background="white", plot_background="white", opacity=".7", font_family="system-ui, sans-serif",
        title_font_size=20, label_font_size=14, major_label_font_size=14, legend_font_size=14,
    )  # fmt: skip
    chart = (pygal.StackedLine if stacked else pygal.Line)(
        title=title, style=style, height=360, width=1000, show_dots=not stacked, dots_size=2, fill=stacked, js=[],
        disable_xml_declaration=True, show_minor_x_labels=False, x_labels_major_every=10, truncate_label=-1,
        truncate_legend=24, legend_at_bottom=True, legend_at_bottom_columns=4, allow_interruptions=True,
        margin_bottom=24,
        range=None if top is None else (0, top), no_data_text="nothing", value_formatter=lambda value: f"{value:,.4g}",
    )  # fmt: skip
    size = (records.until - records.since) / POINTS
    form = "%H:%M" if records.until - records.since <= 86400.0 else "%d %b %H:%M"
    chart.x_labels = [f"{datetime.fromtimestamp(records.since + part * size, UTC):{form}}" for part in range(POINTS)]
    for name, values in lines.items():
        chart.add(name, list(values))
    return f"<figure>{chart.render(is_unicode=True)}</figure>"

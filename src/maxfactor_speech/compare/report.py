"""The report of a comparison: an HTML page with curves, tables and examples, for offline use."""

from __future__ import annotations

from collections import defaultdict
from html import escape
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from maxfactor_speech.compare.runs import best_label, by_label, finished, mean_wer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maxfactor_speech.compare.runs import RunResult

COLORS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b",
    "#bcbd22", "#17becf", "#332288", "#882255",
)  # fmt: skip
TARGET = 0.1  # the word error rate of the column "Steps to 10% WER"
EXAMPLES = 5
RATIO = "/update_ratio"  # how a key of the optimizer's telemetry ends

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1060px; margin: 2em auto;
       padding: 0 1em; }
h1 { font-size: 1.7em; margin-bottom: .2em; } h2 { font-size: 1.2em; margin: 2em 0 .4em; }
p.about { color: #666; margin: 0 0 .3em; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; border-bottom: 2px solid #222; padding: .3em .6em; }
td { text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd; padding: .3em .6em; }
th:first-child, td:first-child, table.examples th, table.examples td { text-align: left; }
table.examples td { white-space: normal; }
tr.best td, td.chosen { background: #eef6ff; font-weight: 600; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
          margin-right: .5em; }
.charts { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 1em; }
@media (max-width: 800px) { .charts { grid-template-columns: minmax(0, 1fr); } }
del { color: #b00020; text-decoration: none; }
"""


def report(
    results: Sequence[RunResult],
    title: str,
    settings: str = "",
    tried: Sequence[RunResult] = (),
) -> str:
    """Return the page as HTML.

    Args:
        results: The results of all trainings that are compared.
        title: The title of the page.
        settings: A line about what all trainings have in common.
        tried: The results of the search for the best learning rates.
    """
    groups = by_label(results)
    colors = {label: COLORS[index % len(COLORS)] for index, label in enumerate(groups)}
    charts = [
        _curves(groups, colors, "wer", "step", "Word error rate", "steps"),
        _curves(groups, colors, "wer", "seconds", "Word error rate", "seconds of training"),
        _curves(groups, colors, "loss", "step", "Training loss", "steps"),
        _curves(groups, colors, "loss", "seconds", "Training loss", "seconds of training"),
    ]
    heat_maps = [
        _heat_map(label, group[0]) for label, group in groups.items() if _lines_with_beta(group[0])
    ]
    charts += [
        _ratios(label, group[0]) for label, group in groups.items() if _lines_with_ratio(group[0])
    ]
    about = [_headline(groups), *filter(None, (_sentence(settings), _note_on_jobs(results)))]
    return _page(title, about, groups, colors, charts, heat_maps, by_label(tried))


def _page(
    title: str,
    about: Sequence[str],
    groups: dict[str, list[RunResult]],
    colors: dict[str, str],
    charts: Sequence[go.Figure],
    heat_maps: Sequence[go.Figure],
    tried: dict[str, list[RunResult]],
) -> str:
    first, *others = [_embedded(chart, index == 0) for index, chart in enumerate(charts)]
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="about">{escape(line)}</p>' for line in about),
        f'<div class="charts">{first}{"".join(others)}</div>',
        f"<h2>Results</h2>{_table(groups, colors)}",
    ]
    if tried:
        parts.append(f"<h2>Learning rates tried</h2>{_tried_table(tried, groups)}")
    if heat_maps:
        parts.append("<h2>Momentum coefficient β of FAM</h2>")
        parts += [_embedded(heat_map) for heat_map in heat_maps]
    if any(finished(group) for group in groups.values()):
        parts.append(f"<h2>Examples</h2>{_examples(groups)}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{STYLE}</style>'
        f"</head><body>{''.join(parts)}</body></html>\n"
    )


# -------------------------------------------------------------------------------- charts


def _curves(
    groups: dict[str, list[RunResult]],
    colors: dict[str, str],
    what: str,
    against: str,
    title: str,
    axis: str,
) -> go.Figure:
    """Plot the mean over seeds, and the range of the seeds as a band behind it."""
    figure = go.Figure()
    for label, group in groups.items():
        x, low, middle, high = _averaged(group, what, against)
        color = colors[label]
        if len(group) > 1:
            figure.add_scatter(
                x=[*x, *reversed(x)],
                y=[*high, *reversed(low)],
                fill="toself",
                fillcolor=color,
                opacity=0.15,
                mode="lines",
                line_width=0,
                hoverinfo="skip",
                showlegend=False,
                legendgroup=label,
            )
        line = {"color": color, "width": 2, "dash": "dot" if "," in label else "solid"}
        mode = "lines+markers" if what == "wer" else "lines"
        figure.add_scatter(x=x, y=middle, name=label, line=line, mode=mode, legendgroup=label)
    figure.update_layout(**_layout(title, axis))
    if what == "wer":
        # Error rates above 100 % are cut off, unless all are.
        top = 1.05 * max(1.0, min(_all_wers(groups), default=1.0))
        figure.update_yaxes(tickformat=".0%", range=[0.0, top])
        figure.update_traces(hovertemplate="%{y:.1%} at %{x}")
    return figure


def _all_wers(groups: dict[str, list[RunResult]]) -> list[float]:
    """Return the word error rates of all evaluations."""
    lines = [line for group in groups.values() for one in group for line in one.metrics]
    return [line["wer"] for line in lines if line.get("wer") is not None]


def _averaged(
    group: Sequence[RunResult], what: str, against: str
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return points on the axis, and the lowest, mean and highest value at each."""
    places: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for result in group:
        for line in result.metrics:
            if line.get(what) is not None:
                places[line["step"]].append((line[against], line[what]))
    points = [places[step] for step in sorted(places)]
    return (
        [mean(x for x, _ in point) for point in points],
        [min(y for _, y in point) for point in points],
        [mean(y for _, y in point) for point in points],
        [max(y for _, y in point) for point in points],
    )


def _heat_map(label: str, result: RunResult) -> go.Figure:
    """Plot the beta of each matrix over the steps."""
    lines = _lines_with_beta(result)
    names = list(lines[-1]["beta"])
    values = [[mean(line["beta"][name]) for line in lines] for name in names]
    figure = go.Figure(
        go.Heatmap(
            x=[line["step"] for line in lines],
            y=[name.removeprefix("model.").removesuffix(".weight") for name in names],
            z=values,
            zmin=0.5,
            zmax=1.0,
            colorscale="Viridis",
            colorbar_title="β",
            hovertemplate="%{y}<br>step %{x}: β = %{z:.3f}<extra></extra>",
        )
    )
    figure.update_layout(**_layout(f"{label}: β per layer", "steps"))
    figure.update_layout(height=160 + 16 * len(names), margin_l=220)
    figure.update_yaxes(autorange="reversed", tickfont_size=10, dtick=1)
    return figure


def _lines_with_beta(result: RunResult) -> list[dict[str, Any]]:
    return [line for line in result.metrics if line.get("beta")]


def _ratios(label: str, result: RunResult) -> go.Figure:
    """Plot how much a step changes each kind of layer, as a share of its size."""
    lines = _lines_with_ratio(result)
    figure = go.Figure()
    for key in (key for key in lines[-1]["optimizer"] if key.endswith(RATIO)):
        points = [(line["step"], line["optimizer"].get(key)) for line in lines]
        x, y = zip(*points, strict=True)
        figure.add_scatter(x=x, y=y, name=key.removesuffix(RATIO), mode="lines+markers")
    figure.update_layout(**_layout(f"{label}: change per step ÷ weight", "steps"))
    figure.update_yaxes(type="log", tickformat=".0e")
    return figure


def _lines_with_ratio(result: RunResult) -> list[dict[str, Any]]:
    lines = [line for line in result.metrics if line.get("optimizer")]
    return [line for line in lines if any(key.endswith(RATIO) for key in line["optimizer"])]


def _layout(title: str, axis: str) -> dict[str, Any]:
    return {
        "title": {"text": f"{title} by {axis}" if " per " not in title else title, "font_size": 15},
        "xaxis_title": axis,
        "template": "plotly_white",
        "height": 380,
        "margin": {"l": 60, "r": 20, "t": 45, "b": 45},
        "legend": {"orientation": "h", "y": -0.22},
        "hovermode": "x",
    }


def _embedded(figure: go.Figure, with_library: bool = False) -> str:
    html: str = figure.to_html(
        full_html=False,
        include_plotlyjs=with_library,
        default_width="100%",
        config={"displayModeBar": False, "responsive": True},
    )
    return f"<div>{html}</div>"


# ------------------------------------------------------------------------ text and tables


def _headline(groups: dict[str, list[RunResult]]) -> str:
    """Return the results in one sentence."""
    parts = [
        f"{label} {_wer(group)} in {mean(one.seconds for one in finished(group)):.0f} s"
        if finished(group)
        else f"{label} diverged"
        for label, group in groups.items()
    ]
    seeds = len(next(iter(groups.values())))
    counted = "1 seed" if seeds == 1 else f"mean of {seeds} seeds"
    return f"Word error rate ({counted}): {', '.join(parts)}."


def _sentence(settings: str) -> str:
    return settings and f"{settings[0].upper()}{settings[1:]}."


def _note_on_jobs(results: Sequence[RunResult]) -> str:
    """Return a warning about the times if trainings ran at the same time."""
    most = max(one.jobs for one in results)
    if most == 1:
        return ""
    return f"Up to {most} trainings ran at the same time, so each took longer than it would alone."


def _tried_table(tried: dict[str, list[RunResult]], groups: dict[str, list[RunResult]]) -> str:
    """Return a table of the learning rates tried; the chosen one is bold."""
    rows = []
    for label, group in tried.items():
        chosen = groups[label][0].lr if label in groups else None
        cells = []
        for one in group:
            kind = ' class="chosen"' if one.lr == chosen else ""
            wer = "diverged" if one.wer is None else f"{one.wer:.1%}"
            cells.append(f"<td{kind}>{one.lr:g}: {wer}</td>")
        rows.append(f"<tr><td>{escape(label)}</td>{''.join(cells)}</tr>")
    most = max(len(group) for group in tried.values())
    head = f'<tr><th>Optimizer</th><th colspan="{most}">lr: WER with one seed</th></tr>'
    return f'<table class="tried">{head}{"".join(rows)}</table>'


def _table(groups: dict[str, list[RunResult]], colors: dict[str, str]) -> str:
    head = (
        "Optimizer", "lr", "Steps", "WER", "Raw WER", "CER", f"Steps to {TARGET:.0%} WER",
        "Step, ms", "Training, s", "State, B/param", "Peak memory, MB",
    )  # fmt: skip
    best = best_label([one for group in groups.values() for one in group])
    rows = []
    for label, group in groups.items():
        kind = ' class="best"' if label == best and finished(group) else ""
        swatch = f'<span class="swatch" style="background:{colors[label]}"></span>'
        cells = "".join(f"<td>{cell}</td>" for cell in _cells(group))
        rows.append(f"<tr{kind}><td>{swatch}{escape(label)}</td>{cells}</tr>")
    titles = "".join(f"<th>{title}</th>" for title in head)
    return f"<table><tr>{titles}</tr>{''.join(rows)}</table>"


def _cells(group: Sequence[RunResult]) -> list[str]:
    first = group[0]
    known = [f"{first.lr:g}", f"{first.steps}"]
    ended = finished(group)
    if not ended:
        return [*known, "diverged", *["—"] * 7]
    diverged = len(group) - len(ended)
    reached = _steps_to_target(ended)
    return [
        *known,
        _wer(ended)
        + _spread(ended)
        + (f", {diverged} of {len(group)} diverged" if diverged else ""),
        f"{mean(one.raw_wer for one in ended if one.raw_wer is not None):.1%}",
        f"{mean(one.cer for one in ended if one.cer is not None):.1%}",
        "not reached" if reached is None else str(reached),
        f"{mean(one.step_ms for one in ended):.0f}",
        f"{mean(one.seconds for one in ended):.0f}",
        f"{ended[0].state_bytes / ended[0].parameters:.2f}",
        f"{mean(one.peak_bytes for one in ended) / 2**20:.0f}",
    ]


def _wer(group: Sequence[RunResult]) -> str:
    return f"{mean_wer(group):.1%}"


def _spread(group: Sequence[RunResult]) -> str:
    rates = [one.wer for one in group if one.wer is not None]
    return f" ± {stdev(rates):.1%}" if len(rates) > 1 else ""


def _steps_to_target(group: Sequence[RunResult]) -> int | None:
    """Return the first step at which the mean over seeds is at most TARGET."""
    steps, _, wers, _ = _averaged(group, "wer", "step")
    return next((int(step) for step, wer in zip(steps, wers, strict=True) if wer <= TARGET), None)


def _examples(groups: dict[str, list[RunResult]]) -> str:
    """Return a table of texts and transcripts; wrong words are marked."""
    firsts = {
        label: finished(group)[0].examples[:EXAMPLES]
        for label, group in groups.items()
        if finished(group)
    }
    head = "".join(f"<th>{escape(label)}</th>" for label in firsts)
    rows = []
    for row in zip(*firsts.values(), strict=False):
        said = row[0]["reference"]
        cells = "".join(f"<td>{_marked(one['hypothesis'], said)}</td>" for one in row)
        rows.append(f"<tr><td>{escape(said)}</td>{cells}</tr>")
    return f'<table class="examples"><tr><th>said</th>{head}</tr>{"".join(rows)}</table>'


def _marked(heard: str, said: str) -> str:
    from jiwer import process_words

    words = heard.split()
    if not words:
        return "<del>(nothing)</del>"
    alignment = process_words(said, heard).alignments[0]
    wrong = {
        place
        for chunk in alignment
        if chunk.type != "equal"
        for place in range(chunk.hyp_start_idx, chunk.hyp_end_idx)
    }
    return " ".join(
        f"<del>{escape(word)}</del>" if place in wrong else escape(word)
        for place, word in enumerate(words)
    )

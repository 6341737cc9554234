"""The report of a comparison: an HTML page with curves, tables and examples, for offline use."""

from __future__ import annotations

from collections import defaultdict
from html import escape
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from maxfactor_speech.compare.runs import (
    best_errors,
    best_label,
    by_label,
    finished,
    last_errors,
    mean_wer,
    ranked_labels,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maxfactor_speech.compare.runs import Errors, RunResult

COLORS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b",
    "#bcbd22", "#17becf", "#332288", "#882255",
)  # fmt: skip
NOTE = (
    "Ranked by the best checkpoint after a step. WER is the word error rate of normalised texts, "
    "raw that of the texts as they are, CER the character error rate."
)
SHORTER = {
    "model.": "", ".weight": "", ".layers": "", "encoder_attn": "cross", "self_attn": "self",
    "encoder": "enc", "decoder": "dec", "embed_": "", "_proj": "",
}  # fmt: skip
TARGET = 0.1  # the word error rate of the column "Steps to 10% WER"
EXAMPLES = 5
RATIO = "/update_ratio"  # how a key of the optimizer's telemetry ends

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1160px; margin: 1.5em auto;
       padding: 0 1em; }
h1 { font-size: 1.6em; line-height: 1.2; margin-bottom: .4em; overflow-wrap: anywhere; }
h2 { font-size: 1.2em; margin: 2em 0 .4em; } h3 { font-size: 1em; margin: 1em 0 0; }
p { margin: 0 0 .4em; max-width: 46em; } p.about { color: #666; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; white-space: nowrap; padding: .3em .6em; }
th { font-weight: 600; vertical-align: bottom; } th.group { text-align: center; }
tr:last-child > th { border-bottom: 2px solid #222; } td { border-bottom: 1px solid #ddd; }
table.results { width: 100%; font-size: 14px; margin-bottom: .6em; }
table.results th, table.results td { padding: .3em .4em; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
tr.best td, td.chosen { background: #eef6ff; font-weight: 600; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
          margin-right: .5em; }
.legend { display: flex; flex-wrap: wrap; gap: .3em; margin: 1em 0 .5em; }
.legend button { font: inherit; font-size: .9em; color: inherit; background: #fff; cursor: pointer;
                 border: 1px solid #ccc; border-radius: 1em; padding: .1em .8em; }
.legend button[aria-pressed=false] { opacity: .4; }
.charts, .examples { display: grid; gap: 1em; grid-template-columns: minmax(0, 1fr); }
@media (min-width: 800px) {
  .charts, .examples { grid-template-columns: repeat(2, minmax(0, 1fr)); }
}
.examples > div { border: 1px solid #ddd; border-radius: 4px; padding: .5em .8em; }
.examples dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .1em .8em;
               margin: 0; overflow-wrap: anywhere; }
.examples dt { color: #666; } .examples dd { margin: 0; } .examples .said { font-weight: 600; }
del { color: #b00020; text-decoration: none; font-weight: 600; }
"""

# A button of the legend shows or hides the curves of its optimizer in all charts.
SCRIPT = """
document.querySelectorAll(".legend button").forEach(button => button.onclick = () => {
  const shown = button.getAttribute("aria-pressed") === "false";
  button.setAttribute("aria-pressed", shown);
  document.querySelectorAll(".charts .plotly-graph-div").forEach(chart => {
    const own = chart.data.flatMap((t, i) => t.legendgroup === button.dataset.label ? [i] : []);
    if (own.length) Plotly.restyle(chart, {visible: shown}, own);
  });
});
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
    about = [*filter(None, (_sentence(settings), _note_on_jobs(results)))]
    lead = "".join(f"<p>{escape(line)}</p>" for line in (_verdict(results), _all_rates(groups)))
    lead += "".join(f'<p class="about">{escape(line)}</p>' for line in about)
    return _page(title, lead, groups, colors, charts, by_label(tried))


def _page(
    title: str,
    lead: str,
    groups: dict[str, list[RunResult]],
    colors: dict[str, str],
    charts: Sequence[go.Figure],
    tried: dict[str, list[RunResult]],
) -> str:
    first, *others = [_embedded(chart, index == 0) for index, chart in enumerate(charts)]
    parts = [
        f"<h1>{escape(title)}</h1>",
        lead,
        _legend(colors),
        f'<div class="charts">{first}{"".join(others)}</div>',
        f'<h2>Results</h2>{_table(groups, colors)}<p class="about">{NOTE}</p>',
    ]
    if tried:
        parts.append(f"<h2>Learning rates tried</h2>{_tried_table(tried, groups)}")
    with_beta = {label: group[0] for label, group in groups.items() if _lines_with_beta(group[0])}
    if with_beta:
        parts.append("<h2>Momentum coefficient β of each matrix</h2>")
    for label, result in with_beta.items():
        parts.append(f"<h3>{escape(label)}</h3>{_embedded(_heat_map(result))}")
    with_ratio = {label: group[0] for label, group in groups.items() if _lines_with_ratio(group[0])}
    if with_ratio:
        parts.append("<h2>Change of the weights per step, relative to their size</h2>")
    for label, result in with_ratio.items():
        parts.append(f"<h3>{escape(label)}</h3>{_embedded(_ratios(result))}")
    if any(finished(group) for group in groups.values()):
        parts.append(f"<h2>Transcripts of the best checkpoints</h2>{_examples(groups)}")
    parts.append(f"<script>{SCRIPT}</script>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
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


def _heat_map(result: RunResult) -> go.Figure:
    """Plot the beta of each matrix over the steps."""
    lines = _lines_with_beta(result)
    names = list(lines[-1]["beta"])
    values = [[mean(line["beta"][name]) for line in lines] for name in names]
    figure = go.Figure(
        go.Heatmap(
            x=[line["step"] for line in lines],
            y=[_short(name) for name in names],
            z=values,
            customdata=[[name] * len(lines) for name in names],
            zmin=0.5,
            zmax=1.0,
            colorscale="Viridis",
            colorbar={"orientation": "h", "thickness": 10, "y": 1.0, "yanchor": "bottom"},
            hovertemplate="%{customdata}<br>step %{x}: β = %{z:.3f}<extra></extra>",
        )
    )
    figure.update_layout(**_layout("", "steps"))
    figure.update_layout(height=130 + 14 * len(names), margin={"l": 110, "t": 60})
    figure.update_yaxes(autorange="reversed", tickfont_size=9, dtick=1)
    return figure


def _short(name: str) -> str:
    """Return the name of a matrix, short enough for an axis on a phone."""
    for long, short in SHORTER.items():
        name = name.replace(long, short)
    return name


def _lines_with_beta(result: RunResult) -> list[dict[str, Any]]:
    return [line for line in result.metrics if line.get("beta")]


def _ratios(result: RunResult) -> go.Figure:
    """Plot how much a step changes each kind of layer, as a share of its size."""
    lines = _lines_with_ratio(result)
    figure = go.Figure()
    for key in (key for key in lines[-1]["optimizer"] if key.endswith(RATIO)):
        points = [(line["step"], line["optimizer"].get(key)) for line in lines]
        x, y = zip(*points, strict=True)
        figure.add_scatter(x=x, y=y, name=key.removesuffix(RATIO), mode="lines+markers")
    legend = {"orientation": "h", "y": -0.25}
    figure.update_layout(**{**_layout("", "steps"), "showlegend": True, "legend": legend})
    figure.update_yaxes(type="log", tickformat=".0e")
    return figure


def _lines_with_ratio(result: RunResult) -> list[dict[str, Any]]:
    lines = [line for line in result.metrics if line.get("optimizer")]
    return [line for line in lines if any(key.endswith(RATIO) for key in line["optimizer"])]


def _layout(title: str, axis: str) -> dict[str, Any]:
    return {
        "title": {"text": f"{title} by {axis}" if title else "", "font_size": 15},
        "xaxis_title": axis,
        "template": "plotly_white",
        "height": 340,
        "margin": {"l": 50, "r": 15, "t": 45, "b": 45},
        "showlegend": False,  # the page has one for all charts
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


def _verdict(results: Sequence[RunResult]) -> str:
    """Return which optimizer is best, by the best checkpoint and after the last step."""
    if not finished(results):
        return "All trainings diverged."
    groups = by_label(results)
    label, last = best_label(results), ranked_labels(results, last_errors)[0]
    best = mean_wer(best_errors(groups[label]))
    seeds = len(groups[label])
    counted = "" if seeds == 1 else f" (mean of {seeds} seeds)"
    text = f"Best: {label}, with {best:.1%} of the words wrong at its best checkpoint{counted}. "
    after = mean_wer(last_errors(groups[last]))
    also = "also " if last == label else ""
    return text + f"After the last step it is {also}{last}, with {after:.1%}."


def _all_rates(groups: dict[str, list[RunResult]]) -> str:
    """Return all results in one sentence, the best first."""

    def text(label: str) -> str:
        ended = finished(groups[label])
        if not ended:
            return f"{label} diverged"
        seconds = mean(one.seconds for one in ended)
        return f"{label} {mean_wer(best_errors(ended)):.1%} in {seconds:.0f} s"

    labels = ranked_labels([one for group in groups.values() for one in group])
    return f"Word error rates at the best checkpoint: {', '.join(map(text, labels))}."


def _legend(colors: dict[str, str]) -> str:
    """Return buttons that name the optimizers, and show or hide their curves."""
    buttons = "".join(
        f'<button aria-pressed="true" data-label="{escape(label)}">'
        f"{_swatch(color)}{escape(label)}</button>"
        for label, color in colors.items()
    )
    return f'<div class="legend">{buttons}</div>'


def _swatch(color: str) -> str:
    return f'<span class="swatch" style="background:{color}"></span>'


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
            wer = "diverged" if one.best is None else f"{one.best.wer:.1%}"
            cells.append(f"<td{kind}>{one.lr:g}: {wer}</td>")
        rows.append(f"<tr><td>{escape(label)}</td>{''.join(cells)}</tr>")
    most = max(len(group) for group in tried.values())
    head = (
        f'<tr><th>Optimizer</th><th class="group" colspan="{most}">'
        "lr: WER of the best checkpoint, one seed</th></tr>"
    )
    return f'<div class="scroll"><table class="tried">{head}{"".join(rows)}</table></div>'


def _table(groups: dict[str, list[RunResult]], colors: dict[str, str]) -> str:
    on_gpu = any(one.gpu_bytes for group in groups.values() for one in group)
    spans = {"": 3, "Best checkpoint": 4, "After the last step": 2, "Time": 3}
    spans["Memory"] = 3 if on_gpu else 2
    titles = (
        "Optimizer", "lr", "steps", "WER", "raw", "CER", "step", "WER", "raw",
        f"steps to<br>{TARGET:.0%} WER", "ms per<br>step", "training,<br>s",
        "state,<br>MB", "state, B<br>per param.", *(["GPU<br>peak, MB"] if on_gpu else []),
    )  # fmt: skip
    best = best_label([one for group in groups.values() for one in group])
    rows = []
    for label, group in groups.items():
        kind = ' class="best"' if label == best and finished(group) else ""
        cells = [*_cells(group), *([_gpu_peak(group)] if on_gpu else [])]
        marked = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f"<tr{kind}><td>{_swatch(colors[label])}{escape(label)}</td>{marked}</tr>")
    above = "".join(
        f'<th class="group" colspan="{span}">{name}</th>' for name, span in spans.items()
    )
    head = "".join(f"<th>{title}</th>" for title in titles)
    return (
        f'<div class="scroll"><table class="results"><thead><tr>{above}</tr><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cells(group: Sequence[RunResult]) -> list[str]:
    first = group[0]
    known = [f"{first.lr:g}", f"{first.steps}"]
    ended = finished(group)
    if not ended:
        return [*known, "diverged", *["—"] * 10]
    diverged = len(group) - len(ended)
    reached = _steps_to_target(ended)
    best, last = best_errors(ended), last_errors(ended)
    steps = [one.step for one in best]
    wer, *others = _rates(best)
    return [
        *known,
        wer + (f", {diverged} of {len(group)} diverged" if diverged else ""),
        *others,
        " to ".join(str(step) for step in sorted({min(steps), max(steps)})),
        *_rates(last)[:2],
        "never" if reached is None else str(reached),
        f"{mean(one.step_ms for one in ended):.0f}",
        f"{mean(one.seconds for one in ended):.0f}",
        f"{ended[0].state_bytes / 1e6:.2f}",
        f"{ended[0].state_bytes / ended[0].parameters:.2f}",
    ]


def _rates(errors: Sequence[Errors]) -> list[str]:
    """Return the means of WER, with its spread, raw WER and CER."""
    wers = [one.wer for one in errors]
    spread = f" ± {stdev(wers):.1%}" if len(wers) > 1 else ""
    raw, cer = mean(one.raw_wer for one in errors), mean(one.cer for one in errors)
    return [f"{mean(wers):.1%}{spread}", f"{raw:.1%}", f"{cer:.1%}"]


def _gpu_peak(group: Sequence[RunResult]) -> str:
    peaks = [one.gpu_bytes for one in group if one.gpu_bytes is not None]
    return f"{mean(peaks) / 1e6:.0f}" if peaks else "—"


def _steps_to_target(group: Sequence[RunResult]) -> int | None:
    """Return the first step at which the mean over seeds is at most TARGET."""
    steps, _, wers, _ = _averaged(group, "wer", "step")
    pairs = zip(steps, wers, strict=True)
    return next((int(step) for step, wer in pairs if step > 0 and wer <= TARGET), None)


def _examples(groups: dict[str, list[RunResult]]) -> str:
    """Return texts with the transcript of each optimizer; wrong words are marked."""
    firsts = {label: best_errors(group)[:1] for label, group in groups.items()}
    shown = {label: one[0].examples[:EXAMPLES] for label, one in firsts.items() if one}
    cards = []
    for row in zip(*shown.values(), strict=False):
        said = row[0]["reference"]
        lines = [f'<dt>said</dt><dd class="said">{escape(said)}</dd>']
        lines += [
            f"<dt>{escape(label)}</dt><dd>{_marked(one['hypothesis'], said)}</dd>"
            for label, one in zip(shown, row, strict=True)
        ]
        cards.append(f"<div><dl>{''.join(lines)}</dl></div>")
    return f'<div class="examples">{"".join(cards)}</div>'


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

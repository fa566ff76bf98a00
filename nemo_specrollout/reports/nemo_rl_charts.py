# SPDX-License-Identifier: Apache-2.0
"""Which charts a run in NeMo-RL has. A chart without a single number is left out."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.layout_engine import ConstrainedLayoutEngine

from nemo_specrollout.config.files import replacing_file
from nemo_specrollout.reports import nemo_rl_panels as panels
from nemo_specrollout.reports.chart_panels import GREY, STYLE, draw_acceptance, draw_reward
from nemo_specrollout.reports.charts import has_any, svg_chart
from nemo_specrollout.reports.head_panels import draw_head_acceptance, head_acceptance
from nemo_specrollout.reports.nemo_rl_run import NemoRlRun
from nemo_specrollout.reports.records import Record, acceptance_totals

HALF, WHOLE = (4.4, 2.5), (9.0, 2.3)
PICTURE_PANELS, DPI = 6, 150
Draw = Callable[[Axes, Sequence[Record]], None]


def charts_of(run: NemoRlRun) -> Iterator[tuple[str, str, bool]]:
    """Yields title, SVG, and whether the chart is as wide as the page, in the order of the page."""
    yield from _charts(run, HALF, {"Reward": _reward(run), "Loss": _loss(run)})
    yield from _charts(run, WHOLE, {"Speculation": [*_speedup(run), *_tokens(run)]})
    yield from _charts(run, HALF, {"Where a step's time goes": _time(run), "Share of generation": _share(run)})
    if totals := acceptance_totals(run.steps):
        yield "Acceptance by position", svg_chart("positions", HALF, totals, draw_acceptance), False
    half = {
        "Acceptance, step by step": _acceptance(run),
        "Engine against trainer": _gap(run),
        "Staleness": _staleness(run),
    }
    yield from _charts(run, HALF, half)
    yield from _charts(
        run, WHOLE, {"Draft head": _head(run), "The tail": _tail(run), "Remote drafters": _drafter_stats(run)}
    )


def picture(run: NemoRlRun, path: Path) -> None:
    """Writes a run in one PNG, three panels in a row and two rows at most: 1200 pixels wide, 420 high for each row."""
    chosen = [*_reward(run), *_speedup(run), *_time(run), *_tokens(run), *_acceptance(run), *_gap(run), *_share(run)]
    chosen = chosen[:PICTURE_PANELS]
    with matplotlib.rc_context(STYLE):
        num_rows = -(-len(chosen) // 3) or 1
        figure = Figure((8.0, 2.8 * num_rows), layout=ConstrainedLayoutEngine(wspace=0.06, hspace=0.08))
        FigureCanvasAgg(figure)
        if chosen:
            axes = figure.subplots(num_rows, min(len(chosen), 3), squeeze=False).ravel()
            for ax, draw in zip(axes, chosen, strict=False):
                draw(ax, run.steps)
            for ax in axes[len(chosen) :]:
                ax.set_axis_off()
        else:
            figure.text(0.5, 0.5, "no finished step yet", ha="center", color=GREY, fontsize=12)
        with replacing_file(path) as temporary:
            figure.savefig(temporary, dpi=DPI, format="png")


def figure_of(path: Path) -> Figure:
    """Returns the picture at `path` as a figure of the same pixels, for loggers that take figures.

    Weights & Biases turns a figure without an image into a chart of its own, which lacks much of it.
    """
    pixels = imread(path)
    figure = Figure((pixels.shape[1] / DPI, pixels.shape[0] / DPI), dpi=DPI)
    FigureCanvasAgg(figure)
    ax = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    ax.imshow(pixels, aspect="auto", interpolation="none")
    ax.set_axis_off()
    return figure


def _charts(run: NemoRlRun, size: tuple[float, float], of: dict[str, list[Draw]]) -> Iterator[tuple[str, str, bool]]:
    """Those that have a panel. A wide chart with one panel is narrowed to that."""
    for title, draw in of.items():
        if draw:
            is_wide = len(draw) > 1
            name = "".join(letter for letter in title.lower() if letter.isalpha())
            yield title, svg_chart(name, size if is_wide else HALF, run.steps, *draw), is_wide


def _if_any(run: NemoRlRun, draw: Draw, *keys: str) -> list[Draw]:
    return [draw] if has_any(run.steps, *keys) else []


def _reward(run: NemoRlRun) -> list[Draw]:
    return _if_any(run, draw_reward, "reward")


def _loss(run: NemoRlRun) -> list[Draw]:
    return _if_any(run, panels.draw_loss, "loss")


def _speedup(run: NemoRlRun) -> list[Draw]:
    return _if_any(run, panels.draw_speedup_estimate, "speedup_estimate")


def _tokens(run: NemoRlRun) -> list[Draw]:
    return _if_any(run, panels.draw_tokens, "tokens_per_request_step")


def _time(run: NemoRlRun) -> list[Draw]:
    return _if_any(run, panels.draw_step_time, "step_s")


def _share(run: NemoRlRun) -> list[Draw]:
    return _if_any(run, panels.draw_generation_share, "generation_share")


def _acceptance(run: NemoRlRun) -> list[Draw]:
    draw = partial(panels.draw_acceptance_of, names=run.drafters)
    return _if_any(run, draw, *(f"{name}/acceptance" for name in run.drafters))


def _gap(run: NemoRlRun) -> list[Draw]:
    return _if_any(run, partial(panels.draw_differences, bound=run.alarm_bound), "logprob_gap.mean", "gen_kl_error")


def _staleness(run: NemoRlRun) -> list[Draw]:
    """Of a run that is ever off its own policy."""
    is_off = any(run.most(key) > 0 for key in ("policy_lag_max", "avg_trajectory_age"))
    return [panels.draw_staleness] if is_off else []


def _head(run: NemoRlRun) -> list[Draw]:
    """Of a head that is refreshed, or could have been."""
    if not has_any(run.steps, "head_age", "heads_published", "draft_refresh.refresh_s"):
        return []
    drafts = (head_acceptance(run.steps) >= 0).any()
    return [*([draw_head_acceptance] if drafts else []), *_if_any(run, panels.draw_head_age, "head_age")]


def _tail(run: NemoRlRun) -> list[Draw]:
    return [*_if_any(run, panels.draw_moves, "tail/moves"), *_if_any(run, panels.draw_saved, "tail/saved_s")]


def _drafter_stats(run: NemoRlRun) -> list[Draw]:
    keys = ("draft_occupancy", "draft_waste")
    return [*_if_any(run, panels.draw_supply, *keys), *_if_any(run, panels.draw_run_ahead, "draft_run_ahead")]

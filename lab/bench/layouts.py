# SPDX-License-Identifier: Apache-2.0
"""Simulates which layout of drafting is fastest for 8B and 32B policies on 8 to 64 H100, from calibrated step times.

    python -m lab.bench.layouts --out DIR [--part layouts|tails|region ...] [--gpu H100] [--seeds 1]

The part `layouts` compares these layouts by the same requests on the same GPUs: no drafts, a draft model in the policy's
engine, an EAGLE-3 head, texts as drafts, and remote drafters on GPUs of their own. Each layout has its best tensor parallel
size of 1, 2, 4 and 8. With remote drafters, each size of the verifier gets the drafter's size that the planner (Algorithm 1 of
SpecActor) chooses for it. The column `planned` shows what the planner chooses if it may choose both sizes.

The part `tails` adds moving, racing and `run_ahead` to several engines of one size. The part `region` uses the planner alone.
It compares remote drafters with the best coupled ones in a steady batch, for any ratio of the time of drafting a token to the
time of the policy's engine step.

Drafts of drafters with weights are right with probability p, and those from texts with p - 0.25. The bench writes layouts.json
and layouts.png into DIR.
"""

import argparse
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from lab.bench.bench_command import write_facts
from lab.bench.bench_tables import new_table
from lab.simulation.layouts import (
    COUPLED_LAYOUTS,
    GPUS,
    LAYOUTS,
    NO_DRAFTS,
    REMOTE,
    VANILLA,
    cases,
    layout_rows,
    region_rows,
    tail_rows,
)
from lab.simulation.measured_gpus import errors, fitted_calibration
from lab.simulation.picture import STYLE
from nemo_specrollout.cli.terminal import log_console
from nemo_specrollout.reports.panels import BLUE, INK, ORANGE, PINK, SILVER, SKY
from nemo_specrollout.storage.files import write_atomically

Rows = Sequence[dict[str, Any]]
_SIZE = (9.6, 6.4)
_DPI = 160
_COLOURS = dict(zip((layout.name for layout in LAYOUTS), (SILVER, PINK, SKY, BLUE, INK, ORANGE), strict=True))


def tables_of(facts: dict[str, Any]) -> Iterator[Table]:
    """Yields a table for each part of the bench that `facts` has."""
    if "layouts" in facts:
        yield winner_table(facts["layouts"])
    if "tails" in facts:
        yield tail_table(facts["tails"])
    if "region" in facts:
        yield region_table(facts["region"])


def winners(rows: Rows) -> Iterator[dict[str, Any]]:
    """Yields for each case the fastest layout, its lead over the second, and how remote drafters compare with the others."""
    keys = dict.fromkeys((r["policy"], r["num_gpus"], r["per_gpu"], r["p"]) for r in rows)
    for key in keys:
        of_case = {r["layout"]: r for r in rows if (r["policy"], r["num_gpus"], r["per_gpu"], r["p"]) == key}
        if len(of_case) < len(LAYOUTS):
            continue
        seconds = {name: r["seconds"] for name, r in of_case.items()}
        ranked = sorted(seconds, key=seconds.__getitem__)
        remote = of_case[REMOTE]
        yield {
            "case": key,
            "best": ranked[0],
            "size": of_case[ranked[0]]["size"],
            "seconds": seconds[ranked[0]],
            "over_plain": seconds[NO_DRAFTS] / seconds[ranked[0]],
            "second": ranked[1],
            "over_second": seconds[ranked[1]] / seconds[ranked[0]],
            "remote_over_model": seconds["draft model"] / seconds[REMOTE],
            "remote_over_vanilla": seconds[VANILLA] / seconds[REMOTE],
            "remote_over_coupled": min(seconds[name] for name in COUPLED_LAYOUTS) / seconds[REMOTE],
            "pair": f"{remote['size']}+{remote.get('drafter', 0)}",
            "planned": f"{remote.get('planned_size', 0)}+{remote.get('planned_drafter', 0)}",
            "planned_loss": remote.get("planned", remote["seconds"]) / remote["seconds"] - 1.0,
        }


def winner_table(rows: Rows) -> Table:
    """Returns a table of the fastest layout in each case. `rows` are the results of the bench's part `layouts`."""
    table = new_table("the fastest layout to the last token, and remote drafters against the others in the same GPUs")
    names = (
        "policy",
        "GPUs",
        "a GPU",
        "p",
        "fastest",
        "TP",
        "s",
        "x plain",
        "second",
        "x second",
        "remote: TP",
        "x same",
    )
    for name in (*names, "x vanilla", "x coupled", "planned", "loses"):
        table.add_column(name, justify="left" if name in ("policy", "fastest", "second") else "right", no_wrap=True)
    for row in winners(rows):
        policy, num_gpus, per_gpu, p = row["case"]
        ratios = (f"{row[k]:.2f}" for k in ("remote_over_model", "remote_over_vanilla", "remote_over_coupled"))
        table.add_row(
            policy,
            str(num_gpus),
            str(per_gpu),
            str(p),
            row["best"],
            str(row["size"]),
            f"{row['seconds']:.1f}",
            f"{row['over_plain']:.2f}",
            row["second"],
            f"{row['over_second']:.2f}",
            row["pair"],
            *ratios,
            row["planned"],
            f"{row['planned_loss']:.0%}",
        )
    return table


_TAILS = ("moving", "two methods", "racing", "moving, six steps", "run_ahead", "run_ahead, moving")


def tail_table(rows: Rows) -> Table:
    """Returns a table of the gains from moving, racing and `run_ahead`. `rows` are the results of the bench's part `tails`."""
    table = new_table(
        "seconds of a rollout over those of engines that draft alike, with neither; the last three are means over six steps"
    )
    for name in ("policy", "a GPU", "layout", "TP", "s", *_TAILS):
        table.add_column(name, justify="left" if name in ("policy", "layout") else "right", no_wrap=True)
    for row in rows:
        cells = (f"{row[name]:.2f}" if name in row else "" for name in _TAILS)
        about = (row["policy"], str(row["per_gpu"]), row["layout"], str(row["size"]), f"{row['seconds']:.1f}")
        table.add_row(*about, *cells)
    return table


def region_table(rows: Rows) -> Table:
    """Returns a table that compares remote drafters with coupled ones, from the results `rows` of the bench's part `region`.

    Its axes are the cost of a draft token, the number of requests per GPU, and the acceptance rate.
    """
    table = new_table("tokens a second of remote drafters over the best coupled ones (free: their GPUs cost nothing)")
    acceptances = sorted({row["p"] for row in rows})
    for name in ("policy", "a GPU", "draft/step", *(f"p {p}" for p in acceptances)):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for key in dict.fromkeys((r["policy"], r["per_gpu"], r["ratio"]) for r in rows):
        of_key = {r["p"]: r for r in rows if (r["policy"], r["per_gpu"], r["ratio"]) == key}
        cells = (
            f"{of_key[p]['over_coupled']:.2f} ({of_key[p]['free']:.2f})" if p in of_key else "" for p in acceptances
        )
        table.add_row(key[0], str(key[1]), str(key[2]), *cells)
    return table


def picture(facts: dict[str, Any]) -> bytes:
    """Returns charts as PNG bytes.

    They show the layouts' speed by acceptance rate, and the cases in which remote drafters win.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(2, 4)
        cases = [(policy, per_gpu) for policy in ("Qwen3-8B", "Qwen3-32B") for per_gpu in (8, 32)]
        for ax, (policy, per_gpu) in zip(axes[0], cases, strict=True):
            _draw_speeds(ax, [r for r in facts.get("layouts", ()) if (r["policy"], r["per_gpu"]) == (policy, per_gpu)])
            ax.set_title(f"{policy}, {per_gpu} requests a GPU", fontsize=7.5)
        if "layouts" in facts:
            axes[0][0].legend(fontsize=6, loc="upper left")
        axes[0][0].set_ylabel("rollout, over no drafts")
        of_8b = [r for r in facts.get("region", ()) if r["policy"] == "Qwen3-8B"]
        for ax, p in zip(axes[1], (0.6, 0.7, 0.8, 0.9), strict=True):
            _draw_region(ax, [r for r in of_8b if r["p"] == p])
            ax.set_title(f"remote over coupled, p {p}", fontsize=7.5)
        axes[1][0].set_ylabel("Qwen3-8B: draft / step, in time")
        file = io.BytesIO()
        figure.savefig(file, format="png")
        return file.getvalue()


def _draw_speeds(ax: Axes, rows: Rows) -> None:
    """Draws the speed of each layout over plain decoding by acceptance rate.

    Only the rows with the largest number of GPUs are drawn.
    """
    rows = [r for r in rows if r["num_gpus"] == max(row["num_gpus"] for row in rows)]
    plain = {r["p"]: r["seconds"] for r in rows if r["layout"] == NO_DRAFTS}
    for name, colour in _COLOURS.items():
        points = sorted((r["p"], plain[r["p"]] / r["seconds"]) for r in rows if r["layout"] == name and r["p"] in plain)
        if points:
            ax.plot(*zip(*points, strict=True), color=colour, label=name, marker="o", markersize=3)
    ax.set_xlabel(f"p, {rows[0]['num_gpus'] if rows else 0} GPUs")


def _draw_region(ax: Axes, rows: Rows) -> None:
    """Draws the speed of remote drafters divided by that of the best coupled ones. It is orange where remote drafters win."""
    if not rows:
        return
    ratios, sizes = (sorted({r[key] for r in rows}) for key in ("ratio", "per_gpu"))
    grid = np.array([[next(r for r in rows if (r["ratio"], r["per_gpu"]) == (y, x)) for x in sizes] for y in ratios])
    values = np.vectorize(lambda r: r["over_coupled"])(grid).astype(float)
    free = np.vectorize(lambda r: r["free"])(grid).astype(float)
    ax.imshow(values, cmap="PuOr_r", vmin=0.4, vmax=1.6, origin="lower", aspect="auto")
    for y, x in np.ndindex(values.shape):
        ax.text(x, y, f"{values[y, x]:.2f}\n({free[y, x]:.2f})", ha="center", va="center", fontsize=5.5, color=INK)
    ax.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    ax.set_yticks(range(len(ratios)), [f"{ratio:g}" for ratio in ratios])
    ax.set_xlabel("requests a GPU")
    ax.grid(visible=False)


_WIDTH = 170
PARTS = ("layouts", "tails", "region")


def main() -> int:
    """Runs the bench. Prints tables, and writes `layouts.json` after each case and `layouts.png` at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--gpu", default="H100")
    parser.add_argument("--seeds", type=int, default=1, help="seeds of the tails")
    parser.add_argument("--gpus", type=int, nargs="+", default=list(GPUS))
    options = parser.parse_args()
    path = options.out / "layouts.json"
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    facts |= {"gpu": options.gpu, "calibration": asdict(fitted_calibration()), "errors_of_steps": errors()}
    for part in PARTS:
        if part not in options.part:
            continue
        rows = {
            "layouts": lambda: layout_rows(list(cases(options.gpu, options.gpus))),
            "tails": lambda: tail_rows(options.gpu, range(options.seeds)),
            "region": lambda: region_rows(options.gpu),
        }[part]()
        facts[part] = []
        for row in rows:
            facts[part].append(row)
            if len(facts[part]) % len(LAYOUTS) == 0:
                write_facts(path, facts)
        write_facts(path, facts)
    console = log_console()
    if not console.is_terminal:
        console.width = _WIDTH
    for table in tables_of(facts):
        console.print(table)
    write_atomically(options.out / "layouts.png", picture(facts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

# SPDX-License-Identifier: Apache-2.0
"""Draws tokens per second by number of running requests, for plain decoding, vLLM's best EAGLE-3, and our drafters.

    python -m lab.gpu.chart results/gpu_check.json --out results/gpu.png

The figures are those of the item `real_8b` in a file of the GPU check. Figures of a rehearsal mean nothing, so the chart of a
rehearsal says this in its title, and cannot be written below docs.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from nemo_specrollout.reports.panels import BLUE, GREY, INK

TABLE = "tokens a second by running requests"
LINES = {"A": GREY, "C": INK, "D": BLUE}
"""Colours of the arms that are drawn, by their letters."""


def main(arguments: list[str] | None = None) -> int:
    """Draws the chart. Returns the exit status, which is 0, or 2 if a sentence on stderr says why nothing was drawn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    report = json.loads(options.file.read_text(encoding="utf-8"))
    rows = report["items"].get("real_8b", {}).get("tables", {}).get(TABLE)
    if not rows:
        print(f"{options.file} has no figures of real_8b", file=sys.stderr)
        return 2
    if report["is_rehearsal"] and "docs" in options.out.resolve().parts:
        print("a rehearsal's figures mean nothing, so its picture does not belong below docs", file=sys.stderr)
        return 2
    draw(report, rows, options.out)
    return 0


def draw(report: dict[str, Any], rows: dict[str, dict[str, float]], out: Path) -> None:
    """Saves the chart to the file `out`. `rows` has the tokens per second by band of running requests for each arm."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((8.0, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    bands = sorted({band for row in rows.values() for band in row}, key=lambda band: int(band.split("-")[0]))
    for title, row in rows.items():
        if title[0] in LINES:
            shown = [band for band in bands if band in row]
            at = [bands.index(band) for band in shown]
            ax.plot(at, [row[band] for band in shown], "o-", color=LINES[title[0]], label=title[2:])
    ax.set_xticks(range(len(bands)), bands)
    ax.set(xlabel="running requests", ylabel="tokens a second", ylim=(0, None))
    where = report["machine"].get("GPU", "CPU")
    conditions = f"{where}, vLLM {report['versions'].get('vllm', '?')}, bfloat16, T=1, 8 prompts of 4 samples"
    ax.set_title("rehearsal: these figures mean nothing" if report["is_rehearsal"] else conditions, loc="left")
    ax.legend()
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""The words, columns and looks of `report.html`; what fills them is in `report.py`."""

from string import Template

PAGE = Template("""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>$title</title>
<style>$css</style></head>
<body><main>
<h1>$title</h1>
<p class="status">$status</p>
$body
</main></body>
</html>
""")

CSS = """
:root { color-scheme: light }
body { margin: 0; background: #f6f8fa; color: #24292f;
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif }
main { max-width: 936px; margin: 0 auto; padding: 28px 24px 48px }
h1 { font-size: 24px; margin: 0 } h2 { font-size: 16px; margin: 0 0 2px }
.status { color: #57606a; margin: 2px 0 18px }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 12px }
.card, section { background: #fff; border: 1px solid #d8dee4; border-radius: 8px }
.card { padding: 12px 14px } .card p { margin: 0; font-size: 12.5px; line-height: 1.35; color: #57606a }
.card .value { font-size: 18px; font-weight: 600; line-height: 1.4; letter-spacing: -0.02em; color: #24292f }
.card .value { white-space: nowrap }
.card.good .value { color: #0072b2 }
.card.bad { background: #fff1ee; border-color: #cf222e } .card.bad .value, .alarms { color: #b3141f }
section { margin-top: 14px; padding: 16px 18px; min-width: 0 }
section p { margin: 0 0 10px; color: #57606a; font-size: 13.5px }
.said { color: #57606a; font-size: 13.5px; padding-left: 20px }
section.alarms { border-color: #cf222e } .alarms ul { margin: 4px 0 0; padding-left: 20px }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 14px }
svg { display: block; width: 100%; height: auto } svg text { font-family: inherit !important }
.scroll { overflow: auto; max-height: 520px }
table { border-collapse: collapse; width: 100%; white-space: nowrap }
th, td { font-size: 12.5px; font-variant-numeric: tabular-nums }
th { position: sticky; top: 0; background: #fff; color: #57606a; font-weight: 600; vertical-align: bottom }
th, td { text-align: right; padding: 3px 0 3px 10px; border-bottom: 1px solid #eaeef2 } td.bad { color: #b3141f }
pre, code { font: 12.5px/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace }
pre { background: #f6f8fa; padding: 10px 12px; margin: 6px 0; overflow-x: auto }
summary { cursor: pointer; font-weight: 600 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 6px 0 0; font-size: 13.5px }
dt { color: #57606a } dd { margin: 0; overflow-wrap: anywhere }
@media (max-width: 720px) { .pair { grid-template-columns: 1fr } }
"""

ROLLOUT_COLUMNS = {
    "step": ("step", "d"),
    "tokens": ("num_tokens", ",d"),
    "length<br>mean": ("response_length.mean", ".1f"),
    "<br>max": ("response_length.max", "d"),
    "rollout<br>s": ("rollout_s", ".2f"),
    "plain<br>est. s": ("plain_estimate_s", ".2f"),
    "speedup<br>x": ("rollout_speedup", ".2f"),
    "engine<br>steps": ("target_steps", ",d"),
    "tokens a<br>step": ("acceptance_length", ".2f"),
    "draft<br>tokens": ("num_draft_tokens", ",d"),
    "steps with<br>drafts": ("share_of_steps_with_drafts", ".0%"),
    "our host<br>time": ("host_share", ".1%"),
    "tokens<br>checked": ("tokens_checked", ",d"),
    "<br>equal": ("tokens_equal", ",d"),
}
TAIL_COLUMNS = {
    "step": ("step", "d"),
    "rollout<br>s": ("rollout_s", ".2f"),
    "saved<br>est. s": ("tail.saved_s", "+.2f"),
    "workers<br>idle": ("tail.idle_share", ".0%"),
    "moves": ("tail.moves", "d"),
    "races": ("tail.races", "d"),
    "won by<br>the racer": ("tail.won_by_racer", "d"),
    "workers<br>died": ("tail.deaths", "d"),
    "runs that<br>diverged": ("tail.diverged", "d"),
}
TRAINING_COLUMNS = {
    "step": ("step", "d"),
    "reward": ("reward", ".3f"),
    "loss": ("loss", ".4f"),
    "KL": ("approx_kl", ".4f"),
    "entropy": ("approx_entropy", ".3f"),
    "gradient<br>norm": ("grad_norm", ".2f"),
    "learning<br>rate": ("lr", ".1e"),
    "log-prob gap<br>mean": ("logprob_gap.mean", ".1e"),
    "<br>max": ("logprob_gap.max", ".1e"),
    "log-prob<br>s": ("logprob_s", ".2f"),
    "train<br>s": ("train_s", ".2f"),
    "refit<br>s": ("refit_s", ".2f"),
    "verify<br>s": ("verify_s", ".2f"),
}
"""Columns of the tables: heading (HTML) -> key of the step, format."""

HOW_TO_READ = {
    "Rollout time": "Blue is the clock; grey is what the same tokens would have cost one at a time, by the step times "
    "that the engine measured in this run. The area between them is time saved; above 1x is faster.",
    "How a batch drains": "Short responses finish first, and few requests are left for much of the time; drafts belong "
    "there, where an engine step has room for them. Pale tokens were drafted in vain.",
    "The tail": "The rollout in which moves and races saved most, by estimate. Above, what each worker had; below, a bar for "
    "each worker that had a request, with the worker's number and colour, and a mark where that ended. Bars side by side are "
    "a race: all racers make the same tokens, so the first to end has made the response. The dashed line is where the rollout "
    "would have ended without moves and races, by estimate; the line before it is where it ended.",
    "Where a step's time goes": "Each bar is one step and the labels are means; the black mark is where the rollout "
    "part would end without speculation, by the estimate.",
    "Acceptance by position": "Of all tokens proposed at a position of a draft, the share that equalled the policy's "
    "own token; small counts are noisy.",
    "Draft head": "A head knows one policy, and the policy moves: acceptance falls until a refreshed head is published. A "
    "head that is not better than the one in service is refused. Refreshes are part of the run's time, right.",
    "Reward": "The mean reward of a step's samples. Problems differ from step to step, so look at the bold line, a "
    "running mean.",
    "Engine against trainer": "How far the engine's log-prob of a sampled token is from the trainer's; a jump means "
    "that a refit went wrong.",
}
"""Title of a chart -> how to read it."""

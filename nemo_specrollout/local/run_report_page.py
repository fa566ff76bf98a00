# SPDX-License-Identifier: Apache-2.0
"""The words and columns of a local run's `report.html`; what fills them is in `report.py`."""

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

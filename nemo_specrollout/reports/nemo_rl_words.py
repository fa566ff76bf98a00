# SPDX-License-Identifier: Apache-2.0
"""The words and columns of the report of a run in NeMo-RL; what fills them is in `nemo_rl_page.py`."""

COLUMNS = {
    "Steps": {
        "step": ("step", "d"),
        "reward": ("reward", ".3f"),
        "loss": ("loss", ".4f"),
        "step<br>s": ("step_s", ".1f"),
        "generation<br>s": ("generation_s", ".1f"),
        "<br>share": ("generation_share", ".0%"),
        "log-prob<br>s": ("logprob_s", ".1f"),
        "train<br>s": ("train_s", ".1f"),
        "refit<br>s": ("refit_s", ".1f"),
        "log-prob<br>gap": ("logprob_gap.mean", ".1e"),
        "KL<br>error": ("gen_kl_error", ".1e"),
        "steps<br>behind": ("policy_lag_mean", ".2f"),
        "<br>trained on": ("avg_trajectory_age", ".2f"),
        "response<br>tokens": ("mean_gen_tokens_per_sample", ".1f"),
    },
    "Engines": {
        "step": ("step", "d"),
        "speedup<br>est. x": ("speedup_estimate", ".2f"),
        "tokens<br>a step": ("tokens_per_request_step", ".2f"),
        "drafts<br>a step": ("draft_tokens_per_request_step", ".2f"),
        "engine<br>steps": ("engine_steps", ",d"),
        "with<br>drafts": ("steps_with_drafts", ".0%"),
        "decode<br>engine s": ("decode_s", ".2f"),
        "our host<br>engine s": ("draft_host_s", ".3f"),
        "refits": ("weight_updates", ".3g"),
        "seeds<br>derived": ("seeds_derived", ",d"),
        "<br>made up": ("seeds_made_up", ",d"),
        "head<br>age": ("head_age", "d"),
        "moves": ("tail/moves", "d"),
        "races": ("tail/races", "d"),
        "saved<br>est. s": ("tail/saved_s", "+.2f"),
        "drafters<br>ready": ("drafters_ready", "d"),
        "drafts<br>in time": ("draft_occupancy", ".0%"),
    },
}
"""Columns of the tables: heading (HTML) -> key of the step, format."""
TITLES = tuple(COLUMNS)

HOW_TO_READ = {
    "Reward": "The mean reward of a step's samples. Problems differ from step to step, so look at the bold line, a "
    "running mean.",
    "Loss": "The policy loss of a step, as NeMo-RL logs it.",
    "Speculation": "Left, what the same tokens would have cost one at a time, by the step times that the engines measured, "
    "over what they did cost. Right, what a request gains in an engine step, 1 without speculation, and how many drafts of it "
    "are verified in that step.",
    "Where a step's time goes": "NeMo-RL's timers, each bar a step; labels are means. Speculation shortens the blue part "
    "only, which in asynchronous GRPO is the time for which the trainer waits.",
    "Share of generation": "How much of a step the trainer spends on generation. In asynchronous GRPO that is the time for "
    "which it waits.",
    "Acceptance by position": "Of all tokens proposed at a position of a draft, the share that equalled the policy's "
    "own token; small counts are noisy.",
    "Acceptance, step by step": "Of each drafter's tokens, the share that equalled the policy's own token.",
    "Engine against trainer": "How far the engine's log-prob of a sampled token is from the trainer's. A jump means that a "
    "refit went wrong; above the dashed line an alarm is raised.",
    "Staleness": "How many training steps the policy that began a sample is behind the one that is trained: of the samples "
    "that ended in a step and, by NeMo-RL's count, of those it was trained on.",
    "Draft head": "A head knows one policy, and the policy moves: acceptance falls until a refreshed head is published. A "
    "head that is not better than the one in service is refused.",
    "The tail": "When engines run out of requests, requests of other engines move to them, or are raced: all racers make "
    "the same tokens, so the first to end has made the response.",
    "Remote drafters": "Of the request steps in which drafts were wanted, those that had one in time; of all drafts, those "
    "that came to nothing. Drafts at hand are as many as one step may take, at most.",
}
"""Title of a chart -> how to read it."""

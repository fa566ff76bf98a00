# SPDX-License-Identifier: Apache-2.0
"""The figures that a run records, with name, unit, meaning and the kinds of runs that record them.

The page docs/reference/metrics.md is written from this table. A name with a dot is a key of an object in a step's line of
`metrics.jsonl`, such as `tail.moves`. A word in angle brackets stands for the name of a drafter, or for a number. Meanings are
Markdown, in which a file below docs becomes a link.
"""

from collections.abc import Mapping
from dataclasses import dataclass

BOTH = "both"
LAB = "lab"
NEMO_RL = "NeMo-RL"
LOGGER = "logger"
"""Mark of a figure that is only in NeMo-RL's logger, and not in `metrics.jsonl`."""


@dataclass(frozen=True)
class Metric:
    """A figure that runs record."""

    name: str
    unit: str
    meaning: str
    runs: str = BOTH
    """Kinds of runs that record the figure, which is BOTH, LAB, NEMO_RL or LOGGER."""


_STEP = (
    Metric(
        "step",
        "",
        "Its number. The lab counts from 0, so it is also the policy version of its requests, and NeMo-RL from 1.",
    ),
    Metric("reward", "", "The mean reward of the step's samples."),
    Metric("loss", "", "The loss of the policy."),
    Metric("num_samples", "samples", "The samples of the step, which are prompts times generations.", LAB),
    Metric("mean_gen_tokens_per_sample", "tokens", "The mean length of a response."),
    Metric("max_gen_tokens_per_sample", "tokens", "The length of the longest response.", LAB),
    Metric(
        "alarms",
        "sentences",
        "A log-prob gap above `logprob_gap_alarm`, a head whose drafts are no longer accepted, failures, and restarted "
        "drafters. The lab also raises an alarm if tokens differ from plain decoding, and for each death.",
    ),
    Metric(
        "began",
        "sentences",
        "What engines that have started since the step before began with, or why they began with nothing "
        "(docs/concepts/budget.md#a-warm-start). It is missing where nothing was kept before.",
    ),
    Metric("deaths", "processes", "Engines and drafter processes that died since the step before.", LAB),
)
_TIMES = (
    Metric("generation_s", "s", "The part of the step in which the trainer waits for generation."),
    Metric("logprob_s", "s", "The log-probs of the samples by the trainer."),
    Metric("train_s", "s", "The training of the policy."),
    Metric("refit_s", "s", "The refit."),
    Metric("verify_s", "s", "Decoding requests again without drafts, for `verify` of the block.", LAB),
    Metric("validation_s", "s", "The validation.", NEMO_RL),
    Metric("checkpoint_s", "s", "The checkpoint.", NEMO_RL),
    Metric("step_s", "s", "The whole step."),
    Metric("ended_s", "s since 1970", "When the step ended.", NEMO_RL),
    Metric(
        "rollout_wall_s",
        "s",
        "In an asynchronous run, the time from the start of the step's samples to the last one.",
        LAB,
    ),
    Metric(
        "collector_idle_s",
        "s",
        "In an asynchronous run, the time in which engines had no work, because no later step might begin yet.",
        LAB,
    ),
)
_SPEED = (
    Metric("num_tokens", "tokens", "The tokens that the engines emitted."),
    Metric("request_steps", "steps", "The number of requests in an engine step, summed over all engine steps."),
    Metric(
        "acceptance_length",
        "tokens",
        "`num_tokens / request_steps`, which is what a request gains in an engine step. Plain decoding has 1.",
    ),
    Metric(
        "rollout_s",
        "s",
        "The engines' time, as a mean over engines. In the lab it is the time of the rollout, without `verify_s`.",
    ),
    Metric(
        "plain_estimate_s",
        "s",
        "The time that plain decoding of the same tokens would have taken, estimated from step times that were measured in "
        "the run. It is missing or `null` where these are not known.",
    ),
    Metric("speedup_estimate", "ratio", "`plain_estimate_s / rollout_s`."),
    Metric("engine_steps", "steps", "The engine steps of all engines, prefill included."),
    Metric(
        "host_share", "0 to 1", "The share of `rollout_s` that this package's own code on the host took within steps."
    ),
    Metric("draft_s", "s", "The time that a drafter with weights took within steps, as a mean over engines."),
    Metric("num_engines", "engines", "The number of engines, if there are several."),
    Metric(
        "engine_idle_share",
        "0 to 1",
        "The share of the engines' time until the last of them ended in which they made no step, if there are several.",
    ),
    Metric("weight_updates", "counts", "The refits of an engine since the step before.", NEMO_RL),
    Metric(
        "seeds_derived",
        "requests",
        "HTTP requests without a seed of their own. Their seed follows from the prompt, and with several engines also from "
        "the engine that serves them.",
        NEMO_RL,
    ),
)
_DRAFTS = (
    Metric("steps_with_drafts", "0 to 1", "The share of `engine_steps` that verified drafts."),
    Metric("draft_tokens_per_request_step", "tokens", "The drafts verified for each request in each engine step."),
    Metric("acceptance.<drafter>.proposed", "counts", "Drafts that were verified, by position in the draft."),
    Metric("acceptance.<drafter>.accepted", "counts", "Drafts that were accepted, by position in the draft."),
    Metric("<drafter>/draft_tokens", "tokens", "Drafts that were verified.", LOGGER),
    Metric("<drafter>/share_of_drafts", "0 to 1", "The drafter's share of all drafts that were verified.", LOGGER),
    Metric("<drafter>/acceptance", "0 to 1", "The share of its drafts that were accepted.", LOGGER),
    Metric("<drafter>/acceptance_pos_<k>", "0 to 1", "The same at position k of the draft, counted from 1.", LOGGER),
)
_AGREEMENT = (
    Metric(
        "logprob_gap",
        "nats",
        "The mean absolute difference of the engine's and the trainer's log-prob of a token, at the sampling temperature and "
        "before training. NeMo-RL has the log of `token_mult_prob_error` here, which is at least that, and equal to it where "
        "it is small.",
    ),
    Metric("logprob_gap_max", "nats", "The largest gap of a token.", LAB),
    Metric(
        "logprob_gap_on_policy",
        "nats",
        "In an asynchronous run, the gap over tokens of the step's own policy, which alone may raise an alarm there.",
        LAB,
    ),
    Metric("logprob_gap_alarm", "0 or 1", "1 if the gap is above `logprob_gap_alarm` of the block.", NEMO_RL),
    Metric("gen_kl_error", "nats", "An estimate of KL(engine, trainer), which is 0 if they agree."),
    Metric("token_mult_prob_error", "ratio", "The mean exp of the absolute gap, which is 1 if they agree."),
    Metric("tokens_checked", "tokens", "Tokens of requests that were decoded again. The longer response counts.", LAB),
    Metric("tokens_equal", "tokens", "Those of them that were equal at their position.", LAB),
    Metric(
        "policy_lag_mean",
        "RL steps",
        "The steps from the policy that began a sample to the one that is trained, as a mean over samples.",
    ),
    Metric("policy_lag_max", "RL steps", "The same for the oldest sample."),
    Metric("samples_updated_amid", "samples", "Samples that got new weights while they ran."),
    Metric(
        "avg_trajectory_age",
        "RL steps",
        "NeMo-RL's own mean of the same, over the samples that the step was trained on.",
        NEMO_RL,
    ),
)
_HEAD = (
    Metric(
        "head_age",
        "policy versions",
        "The age of the head, from the policy that the oldest serving head was made for to the policy of the step.",
    ),
    Metric("head_dormant", "0 to 1", "The share of engines in which the drafter with weights lies dormant."),
    Metric("canary_alarms", "counts", "Alarms about drafts of a head that are no longer accepted.", NEMO_RL),
    Metric("heads_published", "0 or 1", "1 if a head was judged since the step before and published.", NEMO_RL),
    Metric("heads_refused", "0 or 1", "1 if a head was judged since the step before and refused.", NEMO_RL),
    Metric("refresh_s", "s", "The time that training and judging that head took.", NEMO_RL),
    Metric("refresh_failures", "counts", "Failures of the head's trainer since the start.", NEMO_RL),
    Metric("draft_loss", "", "NeMo-RL's own loss of the draft head that it trains (`policy.draft`).", NEMO_RL),
)
_REFRESH = (
    Metric("draft_refresh.decision", "sentence", "Whether the trigger had a head trained, and why."),
    Metric("draft_refresh.gain_s", "s", "What a refresh would save until the run ends."),
    Metric("draft_refresh.gate", "sentence", "What the publish gate says of the new head."),
    Metric("draft_refresh.published", "true or false", "Whether the new head was published."),
    Metric("draft_refresh.head", "name", "The folder of the published head."),
    Metric("draft_refresh.policy_version", "", "The policy version that the new head was trained for."),
    Metric("draft_refresh.refresh_s", "s", "The time that training and judging took."),
    Metric("draft_refresh.expected_length", "tokens", "The new head's acceptance length on held-out samples."),
    Metric("draft_refresh.capture_s", "s", "The part of `rollout_s` that keeping features took.", LAB),
)
_SUPPLY = (
    Metric(
        "draft_supply.occupancy",
        "0 to 1",
        "The share of request steps with a draft in time, among those that wanted one.",
    ),
    Metric(
        "draft_supply.run_ahead",
        "tokens",
        "The drafts at hand for a request in a step, up to as many as one step may take.",
    ),
    Metric(
        "draft_supply.waste",
        "0 to 1",
        "The share of draft tokens that came too late, came for another text, or were dropped after a rejection.",
    ),
    Metric(
        "draft_supply.bottleneck",
        "words",
        "What limits the rollout, which is the verifier, the drafters, or acceptance.",
    ),
    Metric("draft_supply.num_request_steps", "counts", "Request steps that wanted drafts."),
    Metric("draft_supply.num_supplied", "counts", "Those of them with a draft at hand."),
    Metric("draft_supply.num_at_hand", "tokens", "Draft tokens at hand, summed over these request steps."),
    Metric("draft_supply.num_kept", "tokens", "Draft tokens that came in time and for the right text."),
    Metric("draft_supply.num_wrong", "tokens", "Those of them that were dropped after a rejection."),
    Metric("draft_supply.num_late", "tokens", "Draft tokens that came too late."),
    Metric("draft_supply.num_stale", "tokens", "Draft tokens that came for another text."),
    Metric("draft_supply.host_s", "s", "The time of the verifier's host for the exchange with drafters."),
    Metric(
        "draft_supply.draft_token_s",
        "s",
        "The time that the slowest drafter takes for one token of each of its requests.",
    ),
    Metric("draft_supply.num_drafters", "drafters", "The drafters that the config names."),
    Metric("draft_supply.num_ready", "drafters", "The smallest number of drafters that answer an engine."),
    Metric("draft_supply.num_failures", "counts", "How often a drafter was dropped."),
    Metric("draft_supply.problem", "words", "Why the first silent drafter is silent."),
    Metric("draft_supply.num_refused", "requests", "Requests that a drafter cannot draft for."),
    Metric(
        "draft_supply.last_problem",
        "words",
        "Why a drafter failed last, or refused a request, although it may answer by now.",
    ),
    Metric("drafter_restarts", "counts", "Restarts of drafters since the start.", NEMO_RL),
)
_TAIL = (
    Metric("tail.moves", "counts", "Requests that moved, counted once for each move."),
    Metric("tail.races", "counts", "Requests that several engines decoded at once."),
    Metric("tail.won_by_racer", "requests", "Raced requests that a later racer ended."),
    Metric(
        "tail.saved_s",
        "s",
        "An estimate of the time that moves and races saved, which may be negative. Without an estimate it is `null`, or "
        "missing in NeMo-RL.",
    ),
    Metric(
        "tail.diverged",
        "attempts",
        "Attempts that were stopped because they made other tokens than were known, through floating point "
        "(docs/concepts/exactness.md#limits).",
    ),
    Metric(
        "tail.early_worth",
        "ratio",
        "With `run_ahead`, the seconds that an engine without requests spares later for each second, as a mean over engines "
        "and over the decisions of the tail policy.",
    ),
    Metric(
        "tail.declined",
        "counts",
        "Moves and races that the tail policy left out, because the texts that they would displace are worth more.",
    ),
    Metric("tail.idle_share", "0 to 1", "The share of the engines' time without a request.", LAB),
    Metric("tail.deaths", "engines", "Engines that died with requests.", LAB),
)
_HISTORY = (
    Metric("history.num_read", "responses", "Responses of earlier starts that were there.", NEMO_RL),
    Metric("history.bytes_read", "bytes", "The size of their files.", NEMO_RL),
    Metric("history.num_written", "responses", "Responses that came in.", NEMO_RL),
    Metric(
        "history.num_fed",
        "responses",
        "Responses that an engine was fed with, because their prompts came to it.",
        NEMO_RL,
    ),
    Metric(
        "history.num_from_others", "responses", "Those of them that another engine or an earlier start wrote.", NEMO_RL
    ),
)
_AHEAD = (
    Metric("ahead_tokens", "tokens", "Tokens in flight for the step when its weights arrived."),
    Metric("ahead_tokens_<k>", "tokens", "The same for the k-th step from there, with k from 2 to 4."),
    Metric("ahead_kept", "0 to 1", "Of the tokens of responses that had a text, the share in a common prefix with it."),
    Metric("ahead_right", "0 to 1", "Of these tokens, the share that the text or one of its branches had right."),
    Metric("ahead_texts", "counts", "Texts of requests that have ended."),
    Metric("ahead_parted", "counts", "Those of them that parted at a token whose gap is known."),
    Metric("ahead_followed", "counts", "Branches that turned out to be the text."),
    Metric("ahead_runners_up", "0 to 1", "Of the texts that parted, the share where the runner-up was sampled."),
    Metric("ahead_steps", "RL steps", "Coming steps that were planned."),
    Metric("ahead_begun", "counts", "Texts that engines began since the step before."),
    Metric("ahead_branches", "counts", "Branches that they began since then."),
    Metric("ahead_made", "tokens", "Tokens that these texts and branches were given."),
    Metric("ahead_steps_beside", "steps", "Engine steps that had requests of coming steps beside the engine's own."),
    Metric("ahead_s", "s", "The time in which an engine worked for coming steps alone, as a mean over engines."),
    Metric(
        "ahead_delay_s",
        "s",
        "The time by which requests of coming steps made steps of an engine's own requests longer, as a mean over engines. "
        "It is reckoned from the measured prices of their rows, prompts and known texts.",
    ),
    Metric(
        "ahead_saved_s",
        "s",
        "An estimate of the time that these texts saved. It is the time that all drafts saved in the rollout, times the share "
        "of `ahead` among accepted drafts.",
    ),
    Metric("ahead_end_s", "s", "The time until the engines had stopped.", LAB),
)
_LOSS = (
    Metric("kl_penalty", "nats", "The estimated KL divergence from the reference policy, or 0 without one.", LAB),
    Metric(
        "probs_ratio", "ratio", "The probability of a token by the weights in training over that before the step.", LAB
    ),
    Metric("probs_ratio_clamped", "ratio", "The same, clipped.", LAB),
    Metric("clip_fraction", "0 to 1", "The share of tokens whose ratio was clipped.", LAB),
    Metric(
        "approx_kl",
        "nats",
        "The estimated KL divergence between the weights before the step and those in training.",
        LAB,
    ),
    Metric("approx_entropy", "nats", "The estimated entropy of the policy.", LAB),
    Metric("sampling_importance_ratio", "ratio", "The probability of a token by the trainer over the engine's.", LAB),
    Metric("grad_norm", "", "The norm of the gradient.", LAB),
    Metric("lr", "", "The learning rate.", LAB),
    Metric("num_valid_tokens", "tokens", "The tokens that the loss counts.", LAB),
)
METRICS: Mapping[str, tuple[Metric, ...]] = {
    "step": _STEP,
    "times": _TIMES,
    "speed": _SPEED,
    "drafts": _DRAFTS,
    "agreement": _AGREEMENT,
    "draft heads": _HEAD,
    "draft_refresh": _REFRESH,
    "draft_supply": _SUPPLY,
    "tail": _TAIL,
    "history": _HISTORY,
    "run_ahead": _AHEAD,
    "loss": _LOSS,
}
"""The figures of a step, by subject."""
SAMPLE = (
    Metric("prompt", "", "The index of the prompt.", LAB),
    Metric("sample", "", "The index of the sample among those of its prompt.", LAB),
    Metric("seed", "", "The seed of the sample's noise (docs/reference/nemo-rl-patch-points.md#seeds)."),
    Metric("reward", "", "The reward.", LAB),
    Metric("tokens", "tokens", "The length of the response.", LAB),
    Metric("finish", "", "Why the response ended, which is `stop` or `length`.", LAB),
    Metric(
        "policy_spans",
        "pairs",
        "Each policy version that sampled, with the position of the first token that it sampled.",
    ),
    Metric(
        "read_again",
        "positions",
        "The first positions of those policies that computed the keys and values of the whole text anew.",
    ),
    Metric("head_versions", "pair", "The policy version that the head was made for, when the sample began and ended."),
    Metric("num_drafted", "tokens", "Drafts that were verified, over all engines that had the sample."),
    Metric("num_accepted", "tokens", "Those of them that were accepted."),
    Metric("won_by", "", "The engine that ended the sample, if there are several.", LAB),
    Metric("workers", "", "All engines that had the sample.", LAB),
)
"""The figures of a sample, which are in `samples.jsonl`."""
SUMMARY = (
    Metric("steps", "steps", "The finished steps, earlier sessions included."),
    Metric("speedup_estimate", "ratio", "The sum of `plain_estimate_s` over the sum of `rollout_s`."),
    Metric("acceptance_length", "tokens", "The sum of `num_tokens` over the sum of `request_steps`."),
    Metric("reward_first", "", "The mean reward of the first fifth of the steps."),
    Metric("reward_last", "", "The mean reward of the last fifth of the steps."),
    Metric("reward_averaged_over_steps", "steps", "The number of steps in a fifth."),
    Metric("largest_logprob_gap", "nats", "The largest `logprob_gap` of a step."),
    Metric("alarms", "counts", "The number of all alarms."),
    Metric("tokens_checked", "tokens", "The sum over steps, if steps have it.", LAB),
    Metric("tokens_equal", "tokens", "The sum over steps, if steps have it.", LAB),
    Metric("deaths", "processes", "The sum over steps, if steps have it.", LAB),
    Metric("seeds_derived", "requests", "The sum over steps, if steps have it.", NEMO_RL),
    Metric("refreshes", "counts", "Heads that were trained, with `draft_refresh`."),
    Metric("heads_published", "counts", "Those of them that were published."),
    Metric("refresh_s", "s", "The time that refreshes took."),
    Metric("refresh_share", "0 to 1", "Their share of the run's time."),
    Metric("tail_moves", "counts", "The sum of `tail.moves`."),
    Metric("tail_races", "counts", "The sum of `tail.races`."),
    Metric("tail_won_by_racer", "requests", "The sum of `tail.won_by_racer`."),
    Metric("tail_diverged", "attempts", "The sum of `tail.diverged`."),
    Metric("tail_saved_s", "s", "The sum of `tail.saved_s`."),
    Metric("tail_deaths", "engines", "The sum of `tail.deaths`.", LAB),
    Metric("tail_idle_share", "0 to 1", "The share of the engines' time in rollouts without a request.", LAB),
    Metric("ahead_tokens", "tokens", "The sum over steps, with `run_ahead`."),
    Metric("ahead_kept", "0 to 1", "The mean over the steps that had texts."),
    Metric("ahead_right", "0 to 1", "The mean over the steps that had texts."),
    Metric("ahead_saved_s", "s", "The sum of the estimates."),
    Metric("ahead_delay_s", "s", "The sum of the estimates."),
    Metric("wall_s", "s", "The time of this session.", LAB),
    Metric("completed", "true or false", "Whether all steps were made.", LAB),
)
"""The figures of a whole run, which are in `summary.json`."""

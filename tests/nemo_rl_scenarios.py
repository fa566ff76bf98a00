# SPDX-License-Identifier: Apache-2.0
"""The runs that the tests look at: NeMo-RL's GRPO, with what differs between them."""

from typing import Any

PLAIN = ["policy.generation.specrollout.drafters=[]"]
# Drafts of random number in every step, so that much is drafted, accepted and refused in a short run: a fixed budget of this
# number is drawn at random on the host (cpu_host/nemo_rl_cpu/random_budgets.py).
AT_RANDOM = "policy.generation.specrollout.budget={policy: fixed, k: 8}"
DRAFTED = [AT_RANDOM]
OFF = ["policy.generation.specrollout.enabled=false"]
# Without it NeMo-RL alone cannot start with vLLM 0.32: docs/upstream/nemo-rl-synchronize-device.md.
RENAMED = {"NEMO_RL_CPU_SYNCHRONIZE_RENAMED": "1", "NEMO_SPECROLLOUT_V2_ON_CPU": "0"}
EAGLE3 = [
    "policy.draft.enabled=true",
    "policy.draft.model_name=${oc.env:TINY}/eagle3",
    "policy.generation.vllm_kwargs.speculative_config={method: eagle3, model: '${oc.env:TINY}/eagle3', "
    "num_speculative_tokens: 2, draft_tensor_parallel_size: 1}",
    "policy.generation.specrollout.num_speculative_tokens=8",
]
ROUTED_HEAD = [
    "policy.generation.specrollout.drafters=[{type: eagle3, model: '${oc.env:TINY}/eagle3'}, {type: ngram}]",
    AT_RANDOM,
]
# A candidate can only be judged on eight held-out prompts, which the third step completes; any that is judged passes.
REFRESHED_HEAD = [
    *ROUTED_HEAD,
    "policy.generation.specrollout.draft_refresh={trigger: interval, interval: 1, max_train_seconds: 2, max_time_share: 1.0, "
    "rollout_capture_share: 1.0, held_out_share: 0.75, tolerance: 5.0, learning_rate: 0.001}",
]
# Two drafters, which Ray places; drafts as many as are there by then.
REMOTE = [
    "policy.generation.specrollout.drafters=[{type: remote, model: '${oc.env:TINY}/draft', workers: 2}]",
    "policy.generation.specrollout.budget={policy: fixed, k: 3}",
]
FIVE_STEPS, SIX_STEPS = ["grpo.max_num_steps=5"], ["grpo.max_num_steps=6"]
# Until a drafter that was killed is up again.
TWELVE_STEPS, MANY_STEPS = ["grpo.max_num_steps=12"], ["grpo.max_num_steps=24"]


def checkpointed(interrupted: str) -> list[str]:
    """Overrides of a run that is interrupted, and of its resumption: the checkpoints are in the former's folder."""
    return [
        f"checkpointing={{enabled: true, checkpoint_dir: '${{logger.log_dir}}/../{interrupted}/checkpoints', "
        "metric_name: null, save_period: 2, model_save_format: null}",
    ]


FROZEN = [
    "policy.megatron_cfg.optimizer.lr=0",
    "policy.megatron_cfg.optimizer.min_lr=0",
    "policy.megatron_cfg.scheduler.lr_warmup_init=0",
]
PROLONGED = ["policy.megatron_cfg.scheduler.override_opt_param_scheduler=true"]  # for more steps than at first
SHORT = ["policy.generation.max_new_tokens=48"]  # short of the context's end, where NeMo-RL cuts speculating requests
# One at a time in each engine, and long: a training step ends before they do.
LONG = [
    "policy.max_total_sequence_length=256",
    "policy.generation.vllm_cfg.max_model_len=256",
    "policy.generation.max_new_tokens=200",
    "policy.generation.ignore_eos=true",
    "policy.generation.stop_token_ids=[511]",
    "policy.generation.vllm_kwargs.max_num_seqs=1",
]
# Several batches for one step, of which only groups of unequal rewards stay; micro-batches by tokens.
DAPO = [
    "grpo.use_dynamic_sampling=true",
    "grpo.batch_multiplier=2",
    "grpo.dynamic_sampling_max_gen_batches=50",
    "grpo.max_num_steps=2",  # which take most of the prompts
    "grpo.overlong_filtering=true",
    "policy.dynamic_batching.enabled=true",
]
DTENSOR = ["policy.dtensor_cfg.enabled=true", "policy.megatron_cfg.enabled=false"]
TWO_ENGINES = ["cluster.gpus_per_node=2"]
ASYNC = [
    "cluster.gpus_per_node=2",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
    "policy.generation.vllm_cfg.async_engine=true",
    "grpo.async_grpo.enabled=true",
    "loss_fn.use_importance_sampling_correction=true",
    # The lag of one step is in the log-prob gap; a small learning rate keeps that part small.
    "policy.megatron_cfg.optimizer.lr=1e-6",
]
# Synchronous, with the engine apart from the trainer: it has nothing to do while the policy trains.
APART = [
    "cluster.gpus_per_node=2",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
]
AHEAD = ["policy.generation.specrollout.run_ahead={enabled: true}"]
# One engine on the trainer's GPU, which is never idle: texts are made in the slots that its rollout leaves empty.
ROLLING = ["policy.generation.specrollout.run_ahead={steps: 2}"]
# NeMo-RL takes a task's name from the last two parts of the path.
TASK_WITHOUT_DRAFTS = [
    "data.train.data_path=${oc.env:TINY}/tasks/hard.jsonl",
    "policy.generation.specrollout.tasks_without_drafts=[tasks-hard]",
]
# All prompts share blocks of the KV cache, and each update moves the policy so far that an older block shows.
SHARED_PROMPT = [
    "data.default.system_prompt_file=${oc.env:TINY}/system.txt",
    "policy.generation.vllm_kwargs.block_size=32",
    "policy.generation.vllm_kwargs.max_num_seqs=4",
    "policy.generation.max_new_tokens=100",
    "policy.megatron_cfg.optimizer.lr=1e-3",
]
STREAMS = ["policy.generation.vllm_cfg.async_engine=true"]
# Each engine drafts in its own way. `WILD` has requests move and race at random: whatever a policy does, no token may change.
MOVING = [
    "policy.generation.specrollout.fastest_of_n={methods: [[suffix, ngram], [ngram]]}",
    AT_RANDOM,
]
WILD = {"NEMO_RL_CPU_WILD_TAIL": "1"}
# Enough for branches of the requests, and few enough that some are under way when weights change.
FREE_SLOTS = ["policy.generation.vllm_kwargs.max_num_seqs=6"]
IN_FLIGHT = ["grpo.async_grpo.in_flight_weight_updates=true"]
RECOMPUTING = ["grpo.async_grpo.recompute_kv_cache_after_weight_updates=true"]
# Two generate, one trains.
TWO_APART = ["cluster.gpus_per_node=3", "policy.generation.colocated.resources.gpus_per_node=2"]
# NeMo-RL takes a dead engine out and tries its prompts again; at 7ea279a it then ends the run in its next refit.
FLEET_HEALTH = ["async_rl.generation_fleet_health={enabled: true, probe_interval_s: 2.0, probe_timeout_s: 1.0}"]
VALIDATION = [
    "grpo.val_period=2",
    "grpo.val_at_start=true",
    "grpo.max_val_samples=8",
    "grpo.val_batch_size=8",
    "data.validation={dataset_name: ResponseDataset, data_path: '${oc.env:TINY}/train.jsonl', input_key: input, "
    "output_key: output}",
]

SCENARIOS: dict[str, dict[str, Any]] = {
    "sync_plain": {"overrides": SHORT + PLAIN + SIX_STEPS},
    "sync_drafted": {"overrides": SHORT + DRAFTED},
    "sync_routed_head": {"overrides": SHORT + ROUTED_HEAD},
    "sync_refreshed_head": {"overrides": SHORT + REFRESHED_HEAD + FIVE_STEPS},
    "sync_head_interrupted": {
        "overrides": SHORT + REFRESHED_HEAD + checkpointed("sync_head_interrupted") + SIX_STEPS,
        "kill_after": 5,
        "kill": "MegatronPolicyWorker",
    },
    "sync_head_resumed": {"overrides": SHORT + REFRESHED_HEAD + checkpointed("sync_head_interrupted") + SIX_STEPS},
    "sync_remote": {
        "overrides": SHORT + REMOTE + TWELVE_STEPS,
        "kill_after": 2,
        "kill": "SpecrolloutDrafter",
    },
    "sync_eagle3": {"overrides": SHORT + EAGLE3},
    "sync_eagle3_native": {"overrides": SHORT + EAGLE3 + OFF, "environment": RENAMED},
    "dtensor_two_engines": {"overrides": SHORT + DTENSOR + DRAFTED + TWO_ENGINES + VALIDATION},
    "colocated_ahead_tail": {"overrides": SHORT + DTENSOR + AHEAD + TWO_ENGINES + VALIDATION},
    "colocated_rolling": {"overrides": SHORT + ROLLING + SIX_STEPS},
    "sync_dapo_plain": {"overrides": SHORT + PLAIN + DAPO},
    "sync_dapo": {"overrides": SHORT + DRAFTED + DAPO},
    "sync_moving": {
        "overrides": SHORT + DTENSOR + TWO_ENGINES + VALIDATION + MOVING,
        "environment": WILD,
        "kill_after": 2,
        "kill": "SpecrolloutExchange",
    },
    "sync_moving_streams": {
        "overrides": SHORT
        + DTENSOR
        + TWO_ENGINES
        + VALIDATION
        + MOVING
        + ["policy.generation.vllm_cfg.async_engine=true"],
        "environment": WILD,
    },
    "apart_plain": {"overrides": SHORT + APART + VALIDATION + PLAIN + SIX_STEPS},
    "apart_ahead_streams": {"overrides": SHORT + APART + VALIDATION + AHEAD + STREAMS + SIX_STEPS},
    "apart_ahead_tail": {"overrides": SHORT + APART + TWO_APART + VALIDATION + AHEAD + SIX_STEPS},
    "apart_ahead_moving": {
        "overrides": SHORT + APART + TWO_APART + VALIDATION + AHEAD + MOVING + SIX_STEPS,
        "environment": WILD,
        "kill_after": 4,
        "kill": "SpecrolloutExchange",
    },
    "apart_ahead_moving_streams": {
        "overrides": SHORT + APART + TWO_APART + VALIDATION + AHEAD + STREAMS + MOVING + SIX_STEPS,
        "environment": WILD,
    },
    "apart_ahead_interrupted": {
        "overrides": SHORT + APART + VALIDATION + checkpointed("apart_ahead_interrupted") + AHEAD + SIX_STEPS,
        "kill_after": 5,
        "kill": "MegatronPolicyWorker",
    },
    "apart_ahead_resumed": {
        "overrides": SHORT + APART + VALIDATION + checkpointed("apart_ahead_interrupted") + AHEAD + SIX_STEPS
    },
    "apart_ahead_draftless": {"overrides": SHORT + APART + AHEAD + TASK_WITHOUT_DRAFTS},
    "async_ahead": {"overrides": LONG + ASYNC + IN_FLIGHT + RECOMPUTING + AHEAD + FREE_SLOTS + FIVE_STEPS},
    "async_shared_prompt": {"overrides": LONG + ASYNC + IN_FLIGHT + RECOMPUTING + AHEAD + FIVE_STEPS + SHARED_PROMPT},
    "async_plain": {"overrides": SHORT + ASYNC + PLAIN},
    "async_drafted": {"overrides": SHORT + ASYNC + DRAFTED},
    "async_refreshed_head": {"overrides": SHORT + ASYNC + REFRESHED_HEAD, "kill_after": 1, "kill": "HeadTrainer"},
    "async_remote": {
        "overrides": SHORT + ASYNC + REMOTE + MANY_STEPS,
        "kill_after": 2,
        "kill": "SpecrolloutDrafter",
    },
    "async_moving": {"overrides": SHORT + ASYNC + TWO_APART + MOVING, "environment": WILD},
    "async_moving_in_flight": {
        "overrides": LONG + ASYNC + TWO_APART + MOVING + IN_FLIGHT + RECOMPUTING + FIVE_STEPS,
        "environment": WILD,
        "kill_after": 3,
        "kill": "SpecrolloutExchange",
    },
    "async_eagle3": {"overrides": SHORT + ASYNC + IN_FLIGHT + EAGLE3},
    "killed": {"overrides": SHORT + REMOTE, "kill_after": 1},
    "killed_native": {
        "overrides": SHORT + OFF,
        "environment": RENAMED,
        "kill_after": 1,
        "kill": "VllmGenerationWorker",
    },
}

# With the vLLM of a pin, whose kernels run in Triton's interpreter: two prompts and responses of 32 tokens. The policy is one
# that is right often enough for these.
FEW = [
    "policy.model_name=${oc.env:TINY}/repetitive",
    "data.train.data_path=${oc.env:TINY}/threes.jsonl",
    "grpo.num_prompts_per_step=2",
    "policy.train_global_batch_size=8",
    "policy.generation.max_new_tokens=32",
]
# One at a time in each engine, so that weights arrive while a response is under way.
FEW_IN_FLIGHT = [
    *FEW,
    "policy.generation.max_new_tokens=44",
    "policy.generation.ignore_eos=true",
    "policy.generation.stop_token_ids=[511]",
    "policy.generation.vllm_kwargs.max_num_seqs=1",
    *ASYNC,
    *IN_FLIGHT,
    *RECOMPUTING,
]
FEW_APART = [*FEW, *DTENSOR, *APART]
FEW_IN_TWO = [*FEW, *DTENSOR, *TWO_ENGINES, "policy.train_micro_batch_size=4"]
# The same two prompts in each step, whose responses of earlier steps are drafts.
FEW_RECURRING = [*FEW_IN_TWO, "data.train.data_path=${oc.env:TINY}/pair.jsonl", "grpo.max_num_epochs=3"]
PIN_SCENARIOS: dict[str, dict[str, Any]] = {
    "megatron_plain": {"overrides": FEW + PLAIN},
    "megatron_drafted": {"overrides": FEW + DRAFTED},
    "megatron_frozen_head": {"overrides": FEW + ROUTED_HEAD},
    "megatron_eagle3": {"overrides": FEW + EAGLE3},
    "apart_plain": {"overrides": FEW_APART + PLAIN},
    "apart_drafted": {"overrides": FEW_APART + DRAFTED},
    "apart_ahead": {"overrides": FEW_APART + AHEAD + [AT_RANDOM]},
    "async_plain": {"overrides": FEW + ASYNC + PLAIN},
    "async_drafted": {"overrides": FEW + ASYNC + DRAFTED},
    "in_flight": {"overrides": FEW_IN_FLIGHT + DRAFTED},
    "in_flight_ahead": {"overrides": FEW_IN_FLIGHT + AHEAD},
    "dtensor_plain": {"overrides": FEW_IN_TWO + PLAIN},
    "dtensor_moving": {"overrides": FEW_IN_TWO + MOVING, "environment": WILD},
    "recurring_plain": {"overrides": FEW_RECURRING + PLAIN},
    "recurring_drafted": {"overrides": FEW_RECURRING + DRAFTED},
    "async_moving": {"overrides": FEW + ASYNC + TWO_APART + MOVING, "environment": WILD},
}

# So little KV cache that several engines fit beside other work on this machine.
SMALL_CACHE = ["policy.generation.vllm_kwargs.num_gpu_blocks_override=256"]
# Two engines see eight prompts again and again, in another order in each epoch, so that a prompt comes to either engine.
RECURRING = [
    "policy.model_name=${oc.env:TINY}/repetitive",
    "data.train.data_path=${oc.env:TINY}/few.jsonl",
    "grpo.max_num_epochs=3",
    "policy.optimizer.kwargs.lr=1e-4",
    *SIX_STEPS,
    *SHORT,
    *SMALL_CACHE,
    *DTENSOR,
    *TWO_ENGINES,
]
AS_MANY_AS_PAY = ["policy.generation.specrollout.budget={policy: auto}"]
FORGETTING = ["policy.generation.specrollout.learned={history: false, warm_start: false}"]
# The folder of checkpoints is the run's own. A second start begins with a copy of the earlier one's.
WITH_CHECKPOINTS = [
    "checkpointing={enabled: true, checkpoint_dir: '${logger.log_dir}/checkpoints', metric_name: null, save_period: 2, "
    "model_save_format: null}",
]
# Another policy with the same tokenizer leaves its texts in the folder.
OF_STRANGER = ["policy.generation.specrollout.learned.folder=${logger.log_dir}/../stranger/learned"]
STRANGER = [*RECURRING, "policy.model_name=${oc.env:TINY}/policy", "grpo.max_num_steps=2", *OF_STRANGER]
# The samples of a prompt go to two engines in turn. This loop has one epoch, so that the file has its prompts three times.
SPREAD = [
    "policy.model_name=${oc.env:TINY}/repetitive",
    "data.train.data_path=${oc.env:TINY}/recurring.jsonl",
    "data.shuffle=false",
    "grpo.max_num_steps=4",
    *SHORT,
    *SMALL_CACHE,
    *ASYNC,
    *TWO_APART,
]


def _second_start(damage: str | None = None) -> dict[str, Any]:
    """A run that resumes from the checkpoints of `killed`, after what its engines had learned was damaged."""
    return {"overrides": RECURRING + WITH_CHECKPOINTS + AS_MANY_AS_PAY, "earlier": "killed", "damage": damage}


LEARNED_SCENARIOS: dict[str, dict[str, Any]] = {
    "forgetting": {"overrides": RECURRING + DRAFTED + FORGETTING},
    "learning": {"overrides": RECURRING + DRAFTED},
    "killed": {
        "overrides": RECURRING + WITH_CHECKPOINTS + AS_MANY_AS_PAY,
        "kill_after": 5,
        "kill": "DTensorPolicyWorker",
    },
    "resumed": _second_start(),
    "resumed_at_random": {"overrides": RECURRING + WITH_CHECKPOINTS + DRAFTED, "earlier": "killed"},
    **{
        damage: _second_start(damage)
        for damage in ("cut_short", "overwritten", "turned", "other_format", "emptied", "a_folder")
    },
    "stranger": {"overrides": STRANGER},
    "after_stranger": {"overrides": RECURRING + DRAFTED + OF_STRANGER},
    "spread_forgetting": {"overrides": SPREAD + DRAFTED + FORGETTING},
    "spread_learning": {"overrides": SPREAD + DRAFTED},
}

PAIR: dict[str, Any] = {"plain": {"overrides": PLAIN}, "drafted": {"overrides": DRAFTED}}
DATA_PLANE = [*SHORT, "data_plane.enabled=true"]
DATA_PLANE_SCENARIOS: dict[str, Any] = {
    "plain": {"overrides": [*PLAIN, *DATA_PLANE]},
    "drafted": {"overrides": [*DRAFTED, *DATA_PLANE, *VALIDATION]},
    "ahead": {"overrides": [*AHEAD, *APART, *DATA_PLANE, *VALIDATION]},
    "rolling": {"overrides": [*ROLLING, *DATA_PLANE, *VALIDATION]},
}


def _recorded(name: str, *overrides: str) -> dict[str, Any]:
    """A run whose prompt groups are written to a file; $OUT is the folder of all runs."""
    return {"overrides": list(overrides), "environment": {"NEMO_RL_CPU_RECORD": f"$OUT/{name}.jsonl"}}


RECORDED_PAIR: dict[str, Any] = {"plain": _recorded("plain", *PLAIN), "drafted": _recorded("drafted", *DRAFTED)}
PPO_SCENARIOS: dict[str, Any] = {**RECORDED_PAIR, "rolling": _recorded("rolling", *ROLLING)}
GYM_SCENARIOS: dict[str, Any] = {**PAIR, "rolling": {"overrides": ROLLING}}
GYM_CONTROLLER_SCENARIOS: dict[str, Any] = {**RECORDED_PAIR, "ahead": _recorded("ahead", *ROLLING)}
DISTILLATION_SCENARIOS: dict[str, Any] = {**PAIR, "rolling": {"overrides": ROLLING}}
CONTROLLER_SCENARIOS: dict[str, Any] = {
    "native": _recorded("native", *OFF),
    "plain": _recorded("plain", *PLAIN),
    "drafted": _recorded("drafted", *DRAFTED),
    "ahead": _recorded("ahead", *ROLLING),
    "weight_fifo": _recorded("weight_fifo", *DRAFTED, "async_rl.sampler={name: weight_fifo}"),
    "windowed": _recorded("windowed", *DRAFTED, "async_rl.sampler={name: windowed, max_staleness_versions: 1}"),
    "two_engines": _recorded("two_engines", *DRAFTED, *TWO_APART),
    "long": _recorded("long", *PLAIN, *MANY_STEPS),
    "whole": _recorded("whole", *PLAIN, *FROZEN, "grpo.max_num_steps=8"),
    "half": _recorded("half", *DRAFTED, *FROZEN, *checkpointed("half"), "grpo.max_num_steps=2"),
    "resumed": _recorded("resumed", *DRAFTED, *FROZEN, *checkpointed("half"), *PROLONGED, "grpo.max_num_steps=4"),
    "refreshed_head": _recorded("refreshed_head", *REFRESHED_HEAD, *MANY_STEPS),
    "remote": _recorded("remote", *REMOTE, *MANY_STEPS),
    "moving": _recorded("moving", *TWO_APART, *MOVING, "async_rl.recompute_kv_cache_after_weight_updates=true"),
    "engine_lost": {
        **_recorded("engine_lost", *DRAFTED, *TWO_APART, *FLEET_HEALTH),
        "kill_after": 1,
    },
}
for scenarios in (SCENARIOS, PIN_SCENARIOS, LEARNED_SCENARIOS, DATA_PLANE_SCENARIOS, CONTROLLER_SCENARIOS):
    for scenario_name, scenario in scenarios.items():  # for the audit of its rows
        kept = {"NEMO_RL_CPU_KEPT_WEIGHTS": f"$OUT/{scenario_name}/weights"}
        scenario["environment"] = {**scenario.get("environment", {}), **kept}
CONTROLLER_SCENARIOS["moving"]["environment"] |= WILD
CONTROLLER_SCENARIOS["native"]["environment"] |= RENAMED

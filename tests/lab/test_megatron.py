# SPDX-License-Identifier: Apache-2.0
"""The Megatron-Core policy, compared with transformers and with other batchings."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lab.local.export_policy import export_policy
from lab.local.grpo import LossInputs
from lab.local.megatron_model import TokenBatch, next_token_logits
from lab.local.policy import MegatronPolicy
from lab.local.policy_shape import PolicyShape, Weight
from lab.local.run_sections import LossConfig, OptimizerConfig

pytestmark = pytest.mark.integration

OPTIMIZER = OptimizerConfig(lr=1e-2, lr_warmup_iters=3, lr_warmup_init=1e-3)
LOSS = LossConfig(ratio_clip_max=0.28, ratio_clip_c=3.0)


def write_model(folder: Path, tied: bool = False, num_layers: int = 2, is_llama: bool = False) -> Path:
    """Writes a random Qwen3 or Llama with 4 heads in 2 groups. Norms are random, so that tests find swapped ones."""
    torch.manual_seed(0)
    config_class, model_class = (LlamaConfig, LlamaForCausalLM) if is_llama else (Qwen3Config, Qwen3ForCausalLM)
    config = config_class(
        vocab_size=96,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rope_parameters={"rope_theta": 5000.0, "rope_type": "default"},
        tie_word_embeddings=tied,
    )
    model = model_class(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1)
    model.save_pretrained(folder)
    return folder


def make_batch() -> TokenBatch:
    generator = torch.Generator().manual_seed(1)
    sizes = [(3, 9), (1, 30), (5, 1), (2, 17), (7, 0), (4, 12)]
    draw = lambda n: torch.randint(0, 96, (n,), generator=generator).tolist()  # noqa: E731
    return TokenBatch.from_sequences([draw(p) for p, _ in sizes], [draw(r) for _, r in sizes], pad_id=0)


def train(policy: MegatronPolicy, micro_batch_tokens: int = 60) -> dict[str, float]:
    """Takes a step on a fixed batch, whose engine log-probs differ a little from the trainer's."""
    batch, generator = make_batch(), torch.Generator().manual_seed(2)
    noise_BT = 0.2 * torch.randn(batch.tokens_BT.shape, generator=generator)
    prev_BT = policy.logprobs(batch) + noise_BT * batch.response_mask_BT
    advantages_B = torch.randn(len(batch.lengths_B), generator=generator)
    return policy.train_step(
        batch,
        LossInputs(batch.response_mask_BT, advantages_B, prev_BT, prev_BT),
        LOSS,
        micro_batch_tokens=micro_batch_tokens,
    )[0]


def load_policy(folder: Path, optimizer: OptimizerConfig = OPTIMIZER) -> MegatronPolicy:
    return MegatronPolicy.from_pretrained(folder, optimizer=optimizer)


def assert_same_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 0.0) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(params=["untied", "tied", "tied llama"])
def any_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", tied="untied" not in request.param, is_llama="llama" in request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def test_logits_equal_transformers(any_folder: Path) -> None:
    policy, reference = load_policy(any_folder), AutoModelForCausalLM.from_pretrained(any_folder)
    tokens_BT = torch.randint(0, 96, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(
            next_token_logits(policy.model, tokens_BT), reference(tokens_BT).logits, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_transformers(folder: Path, temperature: float) -> None:
    policy, reference, batch = load_policy(folder), Qwen3ForCausalLM.from_pretrained(folder), make_batch()
    logprobs_BT = policy.logprobs(batch, temperature)
    for row, length in enumerate(batch.lengths_B.tolist()):
        tokens_T = batch.tokens_BT[row, :length]
        with torch.no_grad():
            expected_TV = (reference(tokens_T[None]).logits[0, :-1] / temperature).log_softmax(-1)
        expected_T = expected_TV.gather(1, tokens_T[1:, None]).squeeze(1)
        torch.testing.assert_close(logprobs_BT[row, 1:length], expected_T, rtol=0, atol=2e-5)
        assert logprobs_BT[row, 0] == 0
        assert not logprobs_BT[row, length:].any()


def test_weights_round_trip_bit_exact(any_folder: Path) -> None:
    assert_same_tensors(dict(load_policy(any_folder).hf_tensors()), load_file(any_folder / "model.safetensors"))


def test_exported_tensors_do_not_change_with_training(folder: Path) -> None:
    policy = load_policy(folder)
    exported = dict(policy.hf_tensors())
    train(policy)
    assert_same_tensors(exported, load_file(folder / "model.safetensors"))
    assert not torch.equal(dict(policy.hf_tensors())["model.norm.weight"], exported["model.norm.weight"])


def test_missing_surplus_and_misshapen_tensors_are_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    gone = "model.layers.1.self_attn.k_norm.weight"
    for changed, what in (
        ({name: t for name, t in tensors.items() if name != gone}, f"no tensor {gone}"),
        ({**tensors, "stranger.weight": torch.zeros(1)}, r"too many, stranger\.weight"),
        (
            {**tensors, "model.layers.0.mlp.up_proj.weight": torch.zeros(3, 48)},
            r"up_proj\.weight is \[3, 48\].*\[80, 48\]",
        ),
    ):
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(ValueError, match=what):
            load_policy(folder)


def test_tied_checkpoint_may_store_its_head_if_equal(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", tied=True)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, folder / "model.safetensors")
    assert_same_tensors(dict(load_policy(folder).hf_tensors()), tensors)
    save_file({**tensors, "lm_head.weight": embedding + 1}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head.*differs"):
        load_policy(folder)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "gemma3"}, "model_type"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
    ],
)
def test_unsupported_config_is_refused(change: dict[str, object], field: str) -> None:
    config = Qwen3Config().to_dict() | {"rope_parameters": {"rope_theta": 1e6}}
    assert PolicyShape.from_hf(config).rotary_base == 1e6
    with pytest.raises(ValueError, match=field):
        PolicyShape.from_hf(config | change)


def test_a_policy_in_bfloat16_trains_float32_copies(any_folder: Path, tmp_path: Path) -> None:
    exact = load_policy(any_folder)
    policy = MegatronPolicy.from_pretrained(any_folder, optimizer=OPTIMIZER, dtype=torch.bfloat16)
    batch = make_batch()
    gap_BT = (policy.logprobs(batch) - exact.logprobs(batch)).abs()
    assert 0 < gap_BT.max() < 0.3
    found, expected = train(policy, 40), train(exact)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)
    assert found["loss"] == pytest.approx(expected["loss"], abs=0.05)
    policy.save(tmp_path / "saved")
    for _ in range(3):  # a rate at which a weight in bfloat16 alone would hardly move
        train(policy)
    again = MegatronPolicy.from_pretrained(any_folder, optimizer=OPTIMIZER, dtype=torch.bfloat16)
    again.load(tmp_path / "saved")
    for _ in range(3):
        train(again)
    exported = dict(policy.hf_tensors())
    assert_same_tensors(dict(again.hf_tensors()), exported)
    assert all(torch.equal(t, t.bfloat16().float()) for t in exported.values())
    assert not torch.equal(exported["model.norm.weight"], dict(exact.hf_tensors())["model.norm.weight"])


def test_micro_batches_cover_the_batch_within_their_budget() -> None:
    batch = make_batch()
    parts = list(batch.micro_batches(40))
    assert sorted(torch.cat([rows for rows, _ in parts]).tolist()) == list(range(6))
    assert all(len(rows) == 1 or len(rows) * longest <= 40 for rows, longest in parts)
    assert all(int(batch.lengths_B[rows].max()) == longest for rows, longest in parts)


def test_gradient_and_loss_do_not_depend_on_micro_batches(folder: Path) -> None:
    whole, parts = load_policy(folder), load_policy(folder)
    metrics_whole, metrics_parts = train(whole, 10**6), train(parts, 1)
    assert metrics_parts == pytest.approx(metrics_whole, rel=1e-5, abs=1e-6)
    for (name, p), q in zip(whole.model.named_parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_a_forced_on_policy_step_equals_the_first_step(folder: Path) -> None:
    ordinary, forced = load_policy(folder), load_policy(folder)
    batch, advantages_B = make_batch(), torch.linspace(-1, 1, 6)
    prev_BT = ordinary.logprobs(batch)
    metrics, _ = ordinary.train_step(batch, LossInputs(batch.response_mask_BT, advantages_B, prev_BT, prev_BT), LOSS)
    metrics_forced, logprobs_BT = forced.train_step(
        batch, LossInputs(batch.response_mask_BT, advantages_B, None, prev_BT), LOSS, micro_batch_tokens=1
    )
    torch.testing.assert_close(logprobs_BT, prev_BT, rtol=0, atol=1e-5)
    assert metrics_forced == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    for p, q in zip(ordinary.model.parameters(), forced.model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def test_gradient_equals_transformers(any_folder: Path) -> None:
    """The on-policy gradient equals the gradient of the mean of -advantage * log-prob in transformers."""
    policy = load_policy(any_folder, replace(OPTIMIZER, clip_grad=0.0))
    reference, batch = AutoModelForCausalLM.from_pretrained(any_folder), make_batch()
    advantages_B, prev_BT = torch.linspace(-1, 1, 6), policy.logprobs(batch)
    metrics, _ = policy.train_step(
        batch, LossInputs(batch.response_mask_BT, advantages_B, prev_BT, prev_BT), LossConfig()
    )
    logprobs_BTV = reference(batch.tokens_BT).logits[:, :-1].log_softmax(-1)
    logprobs_BT = logprobs_BTV.gather(2, batch.tokens_BT[:, 1:, None]).squeeze(2)
    mask_BT = batch.response_mask_BT[:, 1:]
    (-(advantages_B[:, None] * logprobs_BT * mask_BT).sum() / mask_BT.sum()).backward()
    norm = torch.cat([p.grad.flatten() for p in reference.parameters()]).norm()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    ours = dict(policy.model.named_parameters())["decoder.layers.0.mlp.linear_fc2.weight"].grad
    torch.testing.assert_close(ours, reference.model.layers[0].mlp.down_proj.weight.grad, rtol=1e-3, atol=1e-6)
    assert metrics["probs_ratio"] == pytest.approx(1.0, abs=1e-5)


def test_training_raises_the_probability_of_rewarded_tokens(folder: Path) -> None:
    policy, batch = load_policy(folder, OptimizerConfig(lr=3e-3)), make_batch()
    before_BT = policy.logprobs(batch)
    for _ in range(5):
        prev_BT = policy.logprobs(batch)
        policy.train_step(batch, LossInputs(batch.response_mask_BT, torch.ones(6), prev_BT, prev_BT), LossConfig())
    assert policy.logprobs(batch).sum() > before_BT.sum() + 10


def test_learning_rate_warms_up_and_norms_do_not_decay(folder: Path) -> None:
    policy = load_policy(folder, OptimizerConfig(lr=1e-2, lr_warmup_iters=2, lr_warmup_init=2e-3, weight_decay=0.5))
    assert [train(policy)["lr"] for _ in range(4)] == pytest.approx([2e-3, 6e-3, 1e-2, 1e-2])
    assert [group["weight_decay"] for group in policy._optimizer.param_groups] == [0.5, 0.0]


def test_gradient_is_clipped_to_its_limit(folder: Path) -> None:
    policy = load_policy(folder, replace(OPTIMIZER, clip_grad=1e-3))
    assert train(policy)["grad_norm"] > 1e-3
    norm = torch.cat([p.grad.flatten() for p in policy.model.parameters()]).norm()
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)


def test_a_step_with_a_bad_gradient_changes_nothing(folder: Path) -> None:
    policy, batch = load_policy(folder), make_batch()
    zeros_BT = torch.zeros(batch.tokens_BT.shape)
    with pytest.raises(FloatingPointError, match="nan"):
        policy.train_step(
            batch, LossInputs(batch.response_mask_BT, torch.full((6,), torch.nan), zeros_BT, zeros_BT), LOSS
        )
    assert policy.step == 0
    assert_same_tensors(dict(policy.hf_tensors()), load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("num_steps_before", [0, 3])
def test_resume_is_bit_exact(folder: Path, tmp_path: Path, num_steps_before: int) -> None:
    """The checkpoint replaces all state of the policy, which is new or has been trained further."""
    policy, resumed = load_policy(folder), load_policy(folder)
    train(policy)
    policy.save(tmp_path / "checkpoint")
    expected = [train(policy), train(policy)]
    for _ in range(num_steps_before):
        train(resumed)
    resumed.load(tmp_path / "checkpoint")
    assert resumed.step == 1
    assert [train(resumed), train(resumed)] == expected
    assert_same_tensors(dict(resumed.hf_tensors()), dict(policy.hf_tensors()))


def test_saving_again_replaces_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    policy = load_policy(folder)
    policy.save(tmp_path / "checkpoint")
    train(policy)
    policy.save(tmp_path / "checkpoint")
    resumed = load_policy(folder)
    resumed.load(tmp_path / "checkpoint")
    assert resumed.step == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "model"]


def test_resume_with_another_optimizer_is_refused(folder: Path, tmp_path: Path) -> None:
    load_policy(folder).save(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=r"optimizer\.lr=0\.5"):
        load_policy(folder, replace(OPTIMIZER, lr=0.5)).load(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="no readable checksums"):
        load_policy(folder).load(tmp_path)
    with pytest.raises(ValueError, match=r"another model.*output_layer"):
        load_policy(write_model(tmp_path / "tied", tied=True)).load(tmp_path / "checkpoint")


def test_a_failed_save_leaves_the_old_checkpoint(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(folder)
    policy.save(tmp_path / "checkpoint")
    before = (tmp_path / "checkpoint" / "rank_0_of_1.pt").read_bytes()
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        policy.save(tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint" / "rank_0_of_1.pt").read_bytes() == before


def test_exported_tensors_are_a_hugging_face_model(any_folder: Path) -> None:
    policy = load_policy(any_folder)
    train(policy)
    save_file(dict(policy.hf_tensors()), any_folder / "model.safetensors", metadata={"format": "pt"})
    tokens_BT = make_batch().tokens_BT
    with torch.no_grad():
        logits_BTV = AutoModelForCausalLM.from_pretrained(any_folder)(tokens_BT).logits
        torch.testing.assert_close(next_token_logits(policy.model, tokens_BT), logits_BTV, rtol=0, atol=1e-4)


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 4).map(lambda n: 2 * n), st.integers(1, 3)
)  # fmt: skip
def test_query_groups_lie_where_megatron_looks_for_them(
    groups: int, heads_per_group: int, head_dim: int, hidden: int
) -> None:
    """The layout is bit-exact both ways. Megatron views the rows as [groups, q heads + k + v, head_dim]."""
    rows = [groups * heads_per_group * head_dim, groups * head_dim, groups * head_dim]
    weight = Weight("qkv", {name: (n, hidden) for name, n in zip("qkv", rows, strict=True)}, num_groups=groups)
    q, k, v = torch.randn(sum(rows), hidden).to(torch.bfloat16).split(rows)
    joined = weight.joined([q, k, v])
    assert all(torch.equal(a, b) for a, b in zip(weight.split(joined), (q, k, v), strict=True))
    viewed = joined.view(groups, heads_per_group + 2, head_dim, hidden)
    assert torch.equal(viewed[:, :-2], q.view(groups, heads_per_group, head_dim, hidden))
    assert torch.equal(viewed[:, -2], k.view(groups, head_dim, hidden))
    assert torch.equal(viewed[:, -1], v.view(groups, head_dim, hidden))


def test_a_checkpoint_becomes_a_hugging_face_folder(any_folder: Path, tmp_path: Path) -> None:
    policy = load_policy(any_folder)
    train(policy)
    policy.save(tmp_path / "run" / "checkpoints" / "step_1")
    (tmp_path / "run" / "config.yaml").write_text(f"policy: {{model_name: {any_folder}}}\n")
    export_policy(tmp_path / "run" / "checkpoints" / "step_1", tmp_path / "exported")
    assert_same_tensors(load_file(tmp_path / "exported" / "model.safetensors"), dict(policy.hf_tensors()))
    AutoModelForCausalLM.from_pretrained(tmp_path / "exported")


def test_a_policy_survives_the_end_of_the_process_group(folder: Path) -> None:
    """vLLM's engine destroys the process group when it shuts down in the same process."""
    policy, undisturbed = load_policy(folder), load_policy(folder)
    for again in (False, True):
        torch.distributed.destroy_process_group()
        if again:
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        disturbed = train(policy)
        assert disturbed == train(undisturbed)
        assert torch.distributed.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group()) == [0]


def test_masks_of_a_batch_mark_its_responses() -> None:
    batch = TokenBatch.from_sequences([[5, 6], [7]], [[8], [9, 9, 9]], pad_id=0)
    assert batch.tokens_BT.tolist() == [[5, 6, 8, 0], [7, 9, 9, 9]]
    assert batch.response_mask_BT.int().tolist() == [[0, 0, 1, 0], [0, 1, 1, 1]]


@pytest.mark.slow
def test_speed_of_a_small_run(tmp_path: Path) -> None:
    """Prints the seconds for 64 sequences of 40 to 320 tokens with 3M parameters (run with -s)."""
    config = Qwen3Config(
        vocab_size=128, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    policy = load_policy(tmp_path / "model")
    lengths = (40 + 280 * torch.linspace(0, 1, 64) ** 3.6).long().tolist()  # mean 101
    batch = TokenBatch.from_sequences([[1] * 10] * 64, [[2] * (n - 10) for n in lengths], pad_id=0)
    for _ in range(3):
        start = time.perf_counter()
        prev_BT = policy.logprobs(batch)
        middle = time.perf_counter()
        policy.train_step(batch, LossInputs(batch.response_mask_BT, torch.randn(64), prev_BT, prev_BT), LOSS)
        print(f"logprobs {middle - start:.2f} s, train_step {time.perf_counter() - middle:.2f} s")
    assert policy.step == 3

# SPDX-License-Identifier: Apache-2.0
"""Draft heads: checks of their folders, packing, training, and expected acceptance."""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import STEP_ADDER
from safetensors.torch import load_file, save_file
from speculators.losses.utils import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel

from nemo_specrollout.heads.features.features import SequenceFeatures, hf_features, load_policy
from nemo_specrollout.heads.files.head_facts import (
    LAYER_IDS_FIELD,
    check_head,
    misfit,
    nested_layer_ids,
    read_policy_facts,
)
from nemo_specrollout.heads.training import acceptance
from nemo_specrollout.heads.training import head as head_module
from nemo_specrollout.heads.training.acceptance import (
    draft_logits,
    measure_acceptance,
    overlap,
    probabilities,
)
from nemo_specrollout.heads.training.head import create_head, default_layer_ids, load_eagle3_head, save_head
from nemo_specrollout.heads.training.packing import PADDING, Piece, pack, plan_batches
from nemo_specrollout.heads.training.trainer import Budget, HeadTrainer, TrainingSettings

pytestmark = pytest.mark.integration

LAYER_IDS = default_layer_ids(4)
HIDDEN, VOCAB = 256, 96
TTT_STEPS = 3


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def texts() -> list[tuple[list[int], int]]:
    """Texts of the shipped policy's task, as token ids with the length of the prompt."""
    from lab.local.step_rollout import load_tokenizer
    from lab.policies.warm_start_data import _make_examples

    return _make_examples(load_tokenizer(STEP_ADDER), seed=1, start=0, max_terms=6, has_quick=False)


@pytest.fixture(scope="module")
def sequences(texts: list[tuple[list[int], int]]) -> list[SequenceFeatures]:
    return hf_features(load_policy(STEP_ADDER), texts, LAYER_IDS, max_tokens=2048)


@pytest.fixture(scope="module")
def head_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "head"
    save_head(create_head(STEP_ADDER, LAYER_IDS), folder)
    return folder


@pytest.fixture(scope="module")
def small_head_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that drafts only the even token ids."""
    folder = tmp_path_factory.mktemp("heads") / "small"
    save_head(create_head(STEP_ADDER, LAYER_IDS, draft_token_ids=range(0, VOCAB, 2)), folder)
    return folder


def small_settings(**changes: object):

    values = {"ttt_steps": TTT_STEPS, "batch_tokens": 128, "warmup_steps": 2, "learning_rate": 3e-3}
    return TrainingSettings(**{**values, **changes})


def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def edit_config(folder: Path, edit: Callable[[dict], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, edit: Callable[[dict], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


# Folders of heads


def test_a_saved_head_is_loaded_again_by_us_and_by_speculators(head_folder: Path, small_head_folder: Path) -> None:

    for folder in (head_folder, small_head_folder):
        ours = load_eagle3_head(folder, STEP_ADDER).model.state_dict()
        theirs = Eagle3DraftModel.from_pretrained(folder).state_dict()
        assert ours.keys() == theirs.keys() - {"verifier_norm.weight"}
        for name, tensor in ours.items():
            if name != "embed_tokens.weight":  # equals the policy's, so the folder does not have it
                assert torch.equal(tensor, theirs[name]), name
        assert "embed_tokens.weight" not in load_file(folder / "model.safetensors")


def test_layer_ids_and_context_of_the_policy_are_always_saved(head_folder: Path) -> None:
    config = json.loads((head_folder / "config.json").read_text())
    policy = json.loads((STEP_ADDER / "config.json").read_text())
    assert config[LAYER_IDS_FIELD] == list(LAYER_IDS)
    assert config["transformer_layer_config"]["max_position_embeddings"] == policy["max_position_embeddings"]


def test_saving_replaces_a_head_and_leaves_nothing_else(head_folder: Path, tmp_path: Path) -> None:
    head = load_eagle3_head(head_folder, STEP_ADDER)
    save_head(head, tmp_path / "head")
    with torch.no_grad():
        head.model.fc.weight.add_(1.0)
    save_head(head, tmp_path / "head")
    assert [p.name for p in tmp_path.iterdir()] == ["head"]
    assert torch.equal(load_eagle3_head(tmp_path / "head", STEP_ADDER).model.fc.weight, head.model.fc.weight)


def test_a_failed_save_leaves_the_old_head(head_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = load_eagle3_head(head_folder, STEP_ADDER)
    save_head(head, tmp_path / "head")
    monkeypatch.setattr(head_module, "save_file", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_head(head, tmp_path / "head")
    assert [p.name for p in tmp_path.iterdir()] == ["head"]
    check_head(tmp_path / "head", STEP_ADDER)


def test_the_same_seed_makes_the_same_head() -> None:
    weights = [create_head(STEP_ADDER, LAYER_IDS, seed=seed).model.fc.weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def flatten(folder: Path) -> None:
    """Rewrites a head in the flat layout of vLLM and ModelOpt."""
    config = json.loads((folder / "config.json").read_text())
    flat = config["transformer_layer_config"] | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config["draft_vocab_size"],
        "eagle_config": {LAYER_IDS_FIELD: list(LAYER_IDS), "use_aux_hidden_state": True},
    }
    (folder / "config.json").write_text(json.dumps(flat))
    tensors = load_file(folder / "model.safetensors")
    save_file({n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}, folder / "model.safetensors")


def test_a_head_in_the_flat_layout_is_loaded(small_head_folder: Path, tmp_path: Path) -> None:
    folder = copied(small_head_folder, tmp_path)
    flatten(folder)
    head, original = load_eagle3_head(folder, STEP_ADDER), load_eagle3_head(small_head_folder, STEP_ADDER)
    save_head(head, tmp_path / "again")
    check_head(tmp_path / "again", STEP_ADDER)
    for name, tensor in original.model.state_dict().items():
        assert torch.equal(tensor, head.model.state_dict()[name]), name


def layer(config: dict) -> dict:
    return config["transformer_layer_config"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: layer(c).update(hidden_size=128), "hidden_size 128, the policy's is 256"),
        (lambda c: layer(c).update(vocab_size=100), "vocab_size 100, the policy's is 96"),
        (
            lambda c: layer(c).update(max_position_embeddings=512),
            "max_position_embeddings 512 is less than max_model_len 513",
        ),
        (lambda c: layer(c).update(layer_types=["full_attention"] * 2), "name the type of each of 1 layers"),
        (lambda c: layer(c).update(layer_types=1), "name the type of each of 1 layers"),
        (lambda c: layer(c).update(layer_types=[1]), "name the type of each of 1 layers"),
        (lambda c: layer(c).update(model_type="gpt2"), "model_type 'gpt2'"),
        (lambda c: layer(c).pop("hidden_size"), "hidden_size is None"),
        (lambda c: c.update({LAYER_IDS_FIELD: [1, 2, 4]}), "name distinct layers of the policy, 0 to 3"),
        (lambda c: c.update({LAYER_IDS_FIELD: [1, 2, 2]}), "name distinct layers"),
        (lambda c: c.update({LAYER_IDS_FIELD: [1, 2]}), "fc.weight uses 3 layers; name 3 ids"),
        (lambda c: c.update({LAYER_IDS_FIELD: None}), f"{LAYER_IDS_FIELD} is absent"),
        (lambda c: c.update(draft_vocab_size=97), "draft_vocab_size 97; it must be 1 to 96"),
        (lambda c: c.update(draft_vocab_size=64), r"missing \['d2t'\]"),
        (lambda c: layer(c).update(num_hidden_layers=2, layer_types=None), "missing"),
        (lambda c: c.update(speculators_model_type="dflash"), "speculators_model_type 'dflash'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    head_folder: Path, tmp_path: Path, edit: Callable[[dict], object], message: str
) -> None:
    folder = copied(head_folder, tmp_path)
    edit_config(folder, edit)
    with pytest.raises(ValueError, match=message):
        check_head(folder, STEP_ADDER, 513, read_tensors=False)


def test_positions_of_a_head_are_compared_with_the_length_used(head_folder: Path, tmp_path: Path) -> None:
    folder = copied(head_folder, tmp_path)
    edit_config(folder, lambda c: layer(c).update(max_position_embeddings=512))
    assert misfit(str(folder), str(STEP_ADDER), 512) is None
    assert misfit(str(folder), str(STEP_ADDER)) is None, "the length is not known"
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    edit_config(folder, lambda c: layer(c).update(max_position_embeddings=256, rope_scaling=yarn, rope_parameters=None))
    assert misfit(str(folder), str(STEP_ADDER), 1024) is None
    assert "1024 is less than max_model_len 1025" in (misfit(str(folder), str(STEP_ADDER), 1025) or "")


def test_a_head_without_layer_ids_reads_the_layers_of_vllm() -> None:
    assert nested_layer_ids(None, 8) == nested_layer_ids({LAYER_IDS_FIELD: []}, 8) == (2, 4, 5)
    assert nested_layer_ids({LAYER_IDS_FIELD: [1, 3, 4]}, 8) == (2, 4, 5), "SpecForge numbers outputs in its default"
    assert nested_layer_ids({LAYER_IDS_FIELD: [1, 3, 6]}, 8) == (1, 3, 6)
    assert nested_layer_ids({}, 6) == (), "two of vLLM's three are one layer"


def test_a_speculators_head_norms_before_its_residual_by_default(head_folder: Path, tmp_path: Path) -> None:
    """The defaults of vLLM, which reads two layouts, differ in this."""
    folder = copied(head_folder, tmp_path)
    edit_config(folder, lambda c: c.pop("norm_before_residual"))
    assert load_eagle3_head(folder, STEP_ADDER).model.layers[0].norm_before_residual
    flatten(folder)
    assert not load_eagle3_head(folder, STEP_ADDER).model.layers[0].norm_before_residual


def with_maps(folder: Path, ids: Sequence[int], dtype: torch.dtype, mask_dtype: torch.dtype) -> None:
    """Writes maps to the tokens `ids` into a head that drafts the first of them, as many as there are."""
    ids_D, mask_V = torch.tensor(ids), torch.zeros(VOCAB, dtype=mask_dtype)
    mask_V[ids_D] = 1
    maps = {"d2t": (ids_D - torch.arange(len(ids))).to(dtype), "t2d": mask_V}
    edit_tensors(folder, lambda t: t.update(maps, **{"lm_head.weight": t["lm_head.weight"][ids_D]}))
    edit_config(folder, lambda c: c.update(draft_vocab_size=len(ids)))


def test_identity_maps_of_a_whole_vocabulary_are_accepted(head_folder: Path, tmp_path: Path) -> None:
    folder = copied(head_folder, tmp_path)
    for dtypes in ((torch.int64, torch.bool), (torch.int32, torch.uint8)):
        with_maps(folder, range(VOCAB), *dtypes)
        assert misfit(str(folder), str(STEP_ADDER)) is None
    save_head(load_eagle3_head(folder, STEP_ADDER), tmp_path / "again")
    assert not {"d2t", "t2d"} & load_file(tmp_path / "again" / "model.safetensors").keys()
    with_maps(folder, [1, 0, *range(2, VOCAB)], torch.int64, torch.bool)
    assert "d2t permutes the whole vocabulary" in (misfit(str(folder), str(STEP_ADDER)) or "")


@pytest.mark.parametrize("ids", [[7, 3, *range(20, 60)], list(range(40))])
def test_maps_of_any_type_and_order_draft_the_same(
    head_folder: Path, sequences: list[SequenceFeatures], tmp_path: Path, ids: list[int]
) -> None:
    found = []
    for name, order, dtypes in (
        ("sorted", sorted(ids), (torch.int64, torch.bool)),
        ("permuted", ids[::-1], (torch.int32, torch.uint8)),
    ):
        folder = Path(shutil.copytree(head_folder, tmp_path / name))
        with_maps(folder, order, *dtypes)
        trainer = HeadTrainer(load_eagle3_head(folder, STEP_ADDER), small_settings())
        trainer.train(sequences[:4], Budget(steps=2))
        save_head(trainer.head, folder)
        again = load_eagle3_head(folder, STEP_ADDER)
        assert again.draft_token_ids.tolist() == order
        found.append(measure_acceptance(again, sequences[5:8], TTT_STEPS).survived_NK)
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def two_layers(folder: Path, types: Sequence[str], window: int | None) -> None:
    """Gives a head a second layer like the first, and layers of these `types`."""
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.startswith("layers.0.") and "hidden_norm" not in n]:
        copy = tensors[name][:, HIDDEN:] if any(f"{p}_proj" in name for p in "qkv") else tensors[name]
        tensors[name.replace("layers.0.", "layers.1.")] = copy.clone()
    save_file(tensors, folder / "model.safetensors")
    changes = {"num_hidden_layers": 2, "layer_types": list(types), "sliding_window": window, "max_window_layers": 0}
    edit_config(folder, lambda c: layer(c).update(changes, use_sliding_window=window is not None))


@pytest.mark.parametrize("window", [None, 2, 16])
def test_heads_of_windows_and_two_layers_are_trained_and_judged(
    head_folder: Path, sequences: list[SequenceFeatures], tmp_path: Path, window: int | None
) -> None:
    folder, features = copied(head_folder, tmp_path), sequences[3]
    two_layers(folder, ["full_attention" if window is None else "sliding_attention", "full_attention"], window)
    trainer = HeadTrainer(load_eagle3_head(folder, STEP_ADDER), small_settings())
    trainer.train(sequences[:4], Budget(steps=2))
    save_head(trainer.head, folder)
    check_head(folder, STEP_ADDER)
    head, steps = load_eagle3_head(folder, STEP_ADDER), list[torch.Tensor]()
    assert measure_acceptance(head, [features], TTT_STEPS).expected_length > 1.0
    hook = head.model.lm_head.register_forward_hook(lambda module, inputs, output: steps.append(output[0]))
    batch = pack([features], [Piece(0, 0, features.num_tokens)], ttt_steps=1)
    with torch.no_grad():
        head.model(**batch, ttt_steps=1, loss_config={})
        hook.remove()
        whole, parts = (
            [torch.cat([x for _, k, x in draft_logits(head, features, 4, rows) if k == i]) for i in range(4)]
            for rows in (1000, 7)
        )
    torch.testing.assert_close(whole[0], steps[0], atol=1e-4, rtol=1e-4)
    rows = features.num_tokens - 5
    for drafts, in_parts in zip(whole, parts, strict=True):
        torch.testing.assert_close(drafts[:rows], in_parts[:rows], atol=1e-4, rtol=1e-4)


def fill(name: str, value: float) -> Callable[[dict], object]:
    return lambda tensors: tensors[name].view(-1)[:1].fill_(value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("norm.weight"), r"missing \['norm.weight'\]"),
        (lambda t: t.update({"more.weight": torch.ones(1)}), r"surplus \['more.weight'\]"),
        (lambda t: t.update({"norm.weight": torch.ones(7)}), r"norm.weight is \[7\], its config asks for \[256\]"),
        (fill("fc.weight", float("nan")), "fc.weight has NaN or infinite"),
        (fill("lm_head.weight", float("inf")), "lm_head.weight has NaN or infinite"),
        (lambda t: t["fc.weight"].zero_(), "fc.weight is all zero"),
        (lambda t: t["d2t"].add_(1), "must be distinct ids below 96|name different tokens"),
        (lambda t: t["d2t"].fill_(500), "must be distinct ids below 96"),
    ],
)
def test_tensors_that_no_head_can_have_are_refused(
    small_head_folder: Path, tmp_path: Path, edit: Callable[[dict], object], message: str
) -> None:
    folder = copied(small_head_folder, tmp_path)
    edit_tensors(folder, edit)
    with pytest.raises(ValueError, match=message):
        check_head(folder, STEP_ADDER)


def test_truncated_heads_and_folders_without_a_head_are_refused(head_folder: Path, tmp_path: Path) -> None:
    folder = copied(head_folder, tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        check_head(folder, STEP_ADDER)
    file.unlink()
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        check_head(folder, STEP_ADDER)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        check_head(folder, STEP_ADDER)
    with pytest.raises(ValueError, match="no head folder"):
        check_head(tmp_path / "nothing", STEP_ADDER)


def test_a_new_head_needs_layers_of_the_policy() -> None:
    with pytest.raises(ValueError, match="name distinct layers of the policy"):
        create_head(STEP_ADDER, (1, 2, 9))


def test_the_teacher_and_the_embedding_follow_the_policy(small_head_folder: Path) -> None:
    head = load_eagle3_head(small_head_folder, STEP_ADDER)
    learned = {name: tensor.clone() for name, tensor in head.learned().items()}
    lm_head, embedding = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)
    head.set_policy_weights({"lm_head.weight": lm_head, "model.embed_tokens.weight": embedding, "other": torch.ones(1)})
    assert torch.equal(head.model.verifier_lm_head.weight, lm_head[::2])
    assert torch.equal(head.teacher_VH, lm_head)
    assert torch.equal(head.model.embed_tokens.weight, embedding)
    for name, tensor in head.learned().items():
        assert torch.equal(tensor, learned[name])
    with pytest.raises(ValueError, match="the head's policy has"):
        head.set_policy_weights({"lm_head.weight": torch.ones(2, 2)})


@pytest.mark.parametrize("outer", [True, None])
@pytest.mark.parametrize("inner", [True, None])
def test_the_embedding_of_a_tied_policy_is_the_teacher(tmp_path: Path, outer: bool | None, inner: bool | None) -> None:
    """Many configs do not say that the two are tied; others say it beside, or inside, a block for the language model."""
    folder = copied(STEP_ADDER, tmp_path)
    edit_config(folder, lambda c: c.pop("tie_word_embeddings"))
    said = {} if outer is None else {"tie_word_embeddings": outer}
    edit_config(
        folder, lambda c: c.update(said, text_config={**c, **({} if inner is None else {"tie_word_embeddings": inner})})
    )
    edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
    assert not read_policy_facts(folder).is_untied
    edit_config(folder, lambda c: c.pop("text_config"))
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].float()
    head = create_head(folder, LAYER_IDS)
    assert torch.equal(head.teacher_VH, embedding)
    head.set_policy_weights({"model.embed_tokens.weight": 2 * embedding})
    assert torch.equal(head.model.verifier_lm_head.weight, 2 * embedding)


def test_an_untied_policy_without_an_lm_head_is_refused(tmp_path: Path) -> None:
    folder = copied(STEP_ADDER, tmp_path)
    edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"tie_word_embeddings is false, but it has no lm_head\.weight"):
        create_head(folder, LAYER_IDS)


# Features


def test_features_are_hidden_states_of_the_policy(
    texts: list[tuple[list[int], int]], sequences: list[SequenceFeatures]
) -> None:
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(STEP_ADDER, dtype=torch.float32)
    head = policy.lm_head.weight
    for i in (0, 5, 100):
        ids, prompt_length = texts[i]
        with torch.no_grad():
            output = policy(torch.tensor([ids]), output_hidden_states=True)
        features = sequences[i]
        assert features.token_ids_T.tolist() == ids
        assert features.prompt_length == prompt_length
        expected = torch.cat([output.hidden_states[layer] for layer in LAYER_IDS], dim=-1)[0]
        torch.testing.assert_close(features.aux_TF, expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(features.final_TH @ head.T, output.logits[0], atol=2e-4, rtol=1e-4)


# Packing


def random_features(length: int, prompt_length: int, first_position: int = 0, seed: int = 0) -> SequenceFeatures:
    generator = torch.Generator().manual_seed(seed)
    return SequenceFeatures(
        torch.randint(VOCAB, (length,), generator=generator, dtype=torch.int32),
        torch.randn(length, len(LAYER_IDS) * HIDDEN, generator=generator),
        torch.randn(length, HIDDEN, generator=generator),
        prompt_length, 0, first_position,
    )  # fmt: skip


def test_a_row_has_the_token_after_the_states_that_it_reads() -> None:
    features = random_features(length=8, prompt_length=4, first_position=0)
    batch = pack([features], [Piece(0, 0, 8)], ttt_steps=1)
    assert torch.equal(batch["input_ids"][0], features.token_ids_T[1:].long())
    assert torch.equal(batch["hidden_states"][0], features.aux_TF[:-1])
    assert torch.equal(batch["verifier_last_hidden_states"][0], features.final_TH[1:])
    assert batch["position_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    # Targets begin at the first generated token. No draft follows the last token.
    assert batch["loss_mask"].tolist() == [[False, False, False, True, True, True, False]]


def test_a_window_keeps_its_positions_but_loses_first_rows() -> None:
    batch = pack([random_features(length=8, prompt_length=4, first_position=10)], [Piece(0, 0, 8)], ttt_steps=3)
    assert batch["position_ids"].tolist() == [list(range(11, 18))]
    assert batch["loss_mask"].tolist() == [[False, False, True, True, True, True, False]]


def test_every_row_is_packed_once_with_little_waste() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(2, 300) for _ in range(500)] + [5000]
    batches = plan_batches(lengths, 512, torch.Generator().manual_seed(0))
    rows = sorted((p.sequence, t) for batch in batches for p in batch for t in range(p.start, p.stop - 1))
    assert rows == sorted((i, t) for i, length in enumerate(lengths) for t in range(length - 1))
    assert max(sum(p.num_rows for p in batch) for batch in batches) <= 512
    assert len(rows) > 0.95 * 512 * len(batches)
    assert plan_batches(lengths, 512, torch.Generator().manual_seed(0)) == batches
    assert plan_batches(lengths, 512, torch.Generator().manual_seed(1)) != batches


def test_padding_belongs_to_no_document() -> None:
    batch = pack([random_features(8, 2)], [Piece(0, 0, 8)], ttt_steps=1, num_rows=16)
    assert batch["input_ids"].shape[1] == 16
    assert batch["document_ids"][0, 7:].tolist() == [PADDING] * 9
    assert batch["loss_mask"].sum() == 5


def test_sequences_without_a_target_teach_nothing(head_folder: Path) -> None:
    """Such as prompts only, and sequences shorter than the draft positions."""
    trainer, losses = new_trainer(head_folder), []
    before = learned_of(trainer)
    for features in (random_features(8, 8), random_features(3, 1)):
        trainer.train([features], Budget(steps=1), lambda step, total, loss: losses.append(loss))
    assert losses == [0.0, 0.0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in learned_of(trainer).items())


def test_packed_sequences_have_the_same_losses_as_alone(head_folder: Path, sequences: list[SequenceFeatures]) -> None:

    model = load_eagle3_head(head_folder, STEP_ADDER).model
    # The second sequence begins in its response. Its first targets must not meet drafts of the first sequence.
    cut = sequences[1]
    window = replace(
        cut, token_ids_T=cut.token_ids_T[30:], aux_TF=cut.aux_TF[30:], final_TH=cut.final_TH[30:], first_position=30
    )
    chosen = [sequences[0], window, sequences[2]]
    pieces = [Piece(i, 0, s.num_tokens) for i, s in enumerate(chosen)]

    def total_loss(pieces: list[Piece], num_rows: int | None = None) -> float:
        batch = pack(chosen, pieces, TTT_STEPS, num_rows)
        with torch.no_grad():
            _, loss, _ = model(**batch, ttt_steps=TTT_STEPS, loss_config=resolve_loss_config("kl_div", "eager"))
        return loss.item() * int(batch["loss_mask"].sum())

    alone = sum(total_loss([piece]) for piece in pieces)
    assert total_loss(pieces) == pytest.approx(alone, rel=1e-4)
    assert total_loss(pieces[::-1]) == pytest.approx(alone, rel=1e-4)
    assert total_loss(pieces, num_rows=512) == pytest.approx(alone, rel=1e-4)


# Acceptance


def test_shared_noise_accepts_within_the_bounds_of_the_overlap() -> None:
    torch.manual_seed(0)
    p_RV, q_RV = (torch.softmax(2 * torch.randn(4, 12), -1) for _ in range(2))
    q_RV[1] = p_RV[1]
    q_RV[2, :6] = 0.0
    q_RV[2] /= q_RV[2].sum()
    noise_NV = -torch.empty(20_000, 12).exponential_().log()  # Gumbel noise
    for p_V, q_V, upper in zip(p_RV, q_RV, overlap(p_RV, q_RV).tolist(), strict=True):
        accepted = (p_V.log() + noise_NV).argmax(-1) == (q_V.log() + noise_NV).argmax(-1)
        assert upper / (2.0 - upper) - 0.015 <= accepted.float().mean().item() <= upper + 0.015


def test_tokens_that_the_head_cannot_draft_have_no_overlap() -> None:
    def share(teacher_RV: torch.Tensor, head_RD: torch.Tensor, ids: list[int], temperature: float) -> float:
        return overlap(probabilities(teacher_RV, temperature)[:, ids], probabilities(head_RD, temperature)).item()

    teacher_RV, head_RD = torch.log(torch.tensor([[0.5, 0.3, 0.2]])), torch.log(torch.tensor([[0.6, 0.4]]))
    assert share(teacher_RV, head_RD, [0, 2], 1.0) == pytest.approx(0.7)
    assert share(teacher_RV, head_RD, [0, 2], 0.0) == 1.0
    assert share(teacher_RV, head_RD.flip(-1), [0, 2], 0.0) == 0.0
    assert share(teacher_RV, head_RD, [1, 2], 0.0) == 0.0, "the head cannot draft the arg-max"
    other_RV = torch.log(torch.tensor([[0.2, 0.2, 0.6]]))
    p, q = (torch.softmax(t / 0.5, -1) for t in (teacher_RV, other_RV))
    assert share(teacher_RV, other_RV, [0, 1, 2], 0.5) == pytest.approx(torch.minimum(p, q).sum().item())


def test_drafts_in_chunks_equal_those_of_the_training_forward(
    head_folder: Path, sequences: list[SequenceFeatures]
) -> None:
    head, features, num_drafts = load_eagle3_head(head_folder, STEP_ADDER), sequences[3], 4
    steps: list[torch.Tensor] = []
    hook = head.model.lm_head.register_forward_hook(lambda module, inputs, output: steps.append(output[0]))
    batch = pack([features], [Piece(0, 0, features.num_tokens)], ttt_steps=1)
    with torch.no_grad():
        head.model(**batch, ttt_steps=num_drafts, loss_config={})
        hook.remove()
        for chunk in (7, 16, 1000):
            for start, k, logits in draft_logits(head, features, num_drafts, chunk):
                # The last k rows draft after tokens that do not exist.
                stop = min(start + len(logits), batch["input_ids"].shape[1] - k)
                torch.testing.assert_close(
                    logits[: max(0, stop - start)], steps[k][start : max(start, stop)], atol=1e-4, rtol=1e-4
                )


@pytest.mark.parametrize(("temperature", "chunk_elements"), [(0.8, 1 << 24), (0.8, 1 << 9), (0.0, 1 << 9)])
def test_acceptance_of_a_sequence_is_the_sum_over_its_starts(
    small_head_folder: Path,
    sequences: list[SequenceFeatures],
    temperature: float,
    chunk_elements: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptance, "CHUNK_ELEMENTS", chunk_elements)
    head, features, num_drafts = load_eagle3_head(small_head_folder, STEP_ADDER), sequences[4], 3
    measured = measure_acceptance(head, [features, sequences[5]], num_drafts, temperature)
    with torch.no_grad():
        logits = {k: x for _, k, x in draft_logits(head, features, num_drafts, 1000)}
        teacher_TV = features.final_TH @ head.teacher_VH.T
    counts, survived = [0] * num_drafts, [0.0] * num_drafts
    for row in range(features.prompt_length - 1, features.num_tokens - 1):
        survival = 1.0
        for k in range(min(num_drafts, features.num_tokens - 2 - row)):
            survival *= _share_in_common(teacher_TV[row + 1 + k], logits[k][row], head.draft_token_ids, temperature)
            counts[k] += 1
            survived[k] += survival
    assert measured.count_NK[0].tolist() == counts
    assert measured.survived_NK[0] == pytest.approx(survived, rel=1e-4)
    expected_length = 1.0 + sum(s / n for s, n in zip(survived, counts, strict=True))
    assert measured.expected_length_N[0] == pytest.approx(expected_length, rel=1e-4)
    for bad in ({"num_drafts": 0}, {"temperature": -1.0}):
        with pytest.raises(AssertionError):
            measure_acceptance(head, [features], **bad)


def _share_in_common(
    teacher_V: torch.Tensor, head_D: torch.Tensor, draft_token_ids: torch.Tensor, temperature: float
) -> float:
    """Returns 1 - TV by its definition."""
    if temperature == 0.0:
        return float(teacher_V.argmax() == draft_token_ids[head_D.argmax()])
    p_V, q_V = torch.softmax(teacher_V / temperature, -1), torch.zeros_like(teacher_V)
    q_V[draft_token_ids] = torch.softmax(head_D / temperature, -1)
    return 1.0 - 0.5 * float((p_V - q_V).abs().sum())


# Training


def learned_of(trainer: object) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.head.learned().items()}


def new_trainer(folder: Path, **changes: object):

    return HeadTrainer(load_eagle3_head(folder, STEP_ADDER), small_settings(**changes))


def test_training_raises_the_acceptance_on_unseen_texts(head_folder: Path, sequences: list[SequenceFeatures]) -> None:
    trainer = new_trainer(head_folder, loss="kl_div")
    held_out = sequences[:20]
    before = measure_acceptance(trainer.head, held_out, TTT_STEPS)
    result = trainer.train(sequences[20:], Budget(steps=60))
    after = measure_acceptance(trainer.head, held_out, TTT_STEPS)
    assert result.steps == trainer.num_steps == 60
    assert after.acceptance_rate_K[0] > before.acceptance_rate_K[0] + 0.1
    assert (after.expected_length_N > before.expected_length_N).sum() >= 18


def test_the_policys_tensors_never_change(small_head_folder: Path, sequences: list[SequenceFeatures]) -> None:
    trainer = new_trainer(small_head_folder)
    model = trainer.head.model
    frozen = {"embed_tokens.weight", "verifier_lm_head.weight"}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    teacher = trainer.head.teacher_VH.clone()
    trainer.train(sequences, Budget(steps=2))
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == frozen
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) == (name in frozen | {"t2d", "d2t"}), name
    assert torch.equal(trainer.head.teacher_VH, teacher)
    assert all(model.get_parameter(name).grad is None for name in frozen)


@pytest.mark.parametrize("killed_at", [1, 6])
def test_a_resumed_training_ends_like_an_uninterrupted_one(
    head_folder: Path, sequences: list[SequenceFeatures], tmp_path: Path, killed_at: int
) -> None:
    few, budget, state = sequences[:8], Budget(steps=8), tmp_path / "state.pt"
    losses: list[list[float]] = [[], []]
    whole = new_trainer(head_folder)
    whole.train(few, budget, lambda step, total, loss: losses[0].append(loss))

    def kill(step: int, total: int, loss: float) -> None:
        assert total == 8
        losses[1].append(loss)
        if step == killed_at:
            killed.save(state)
            raise KeyboardInterrupt

    killed = new_trainer(head_folder)
    with pytest.raises(KeyboardInterrupt):
        killed.train(few, budget, kill)
    resumed = new_trainer(head_folder)
    resumed.load(state)
    result = resumed.train(few, budget, lambda step, total, loss: losses[1].append(loss))
    assert result.steps == 8
    assert losses[0] == losses[1]
    expected = learned_of(whole)
    for name, tensor in learned_of(resumed).items():
        assert torch.equal(tensor, expected[name]), name
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


def test_a_second_training_continues_with_the_optimizer(head_folder: Path, sequences: list[SequenceFeatures]) -> None:
    trainer = new_trainer(head_folder)
    trainer.train(sequences[:8], Budget(steps=2))
    result = trainer.train(sequences[8:16], Budget(steps=3))
    assert trainer.num_steps == 2 + result.steps == 5
    assert 0 < result.tokens <= 3 * 128


def test_a_state_with_other_settings_is_refused(head_folder: Path, tmp_path: Path) -> None:
    new_trainer(head_folder).save(tmp_path / "state.pt")
    with pytest.raises(ValueError, match=r"its learning_rate is 0.003, not 0.5"):
        new_trainer(head_folder, learning_rate=0.5).load(tmp_path / "state.pt")


def test_a_step_with_a_loss_that_is_not_finite_is_not_taken(
    head_folder: Path, sequences: list[SequenceFeatures]
) -> None:
    trainer = new_trainer(head_folder)
    trainer.train(sequences[:4], Budget(steps=1))
    before = learned_of(trainer)
    broken = replace(sequences[0], aux_TF=torch.full_like(sequences[0].aux_TF, torch.nan))
    with pytest.raises(FloatingPointError, match="not taken"):
        trainer.train([broken], Budget(steps=1))
    assert trainer.num_steps == 1
    for name, tensor in learned_of(trainer).items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("loss", ["kl_div", "tv", "nla", "lk_hybrid", '{"kl_div": 0.5, "tv": 0.5}'])
def test_every_loss_falls(head_folder: Path, sequences: list[SequenceFeatures], loss: str) -> None:
    losses: list[float] = []
    new_trainer(head_folder, loss=loss).train(sequences[:3], Budget(steps=8), lambda s, n, value: losses.append(value))
    assert losses[-1] < losses[0]


def test_a_training_may_end_with_total_variation_alone(head_folder: Path, sequences: list[SequenceFeatures]) -> None:
    def losses(**changes: object) -> list[float]:
        found: list[float] = []
        trainer = new_trainer(head_folder, **changes)
        trainer.train(sequences[:3], Budget(steps=4), lambda step, total, loss: found.append(loss))
        return found

    late, never, always = losses(loss="kl_div", tv_after=0.5), losses(loss="kl_div"), losses(loss="tv")
    assert late[:2] == never[:2] and max(late[2:]) < TTT_STEPS < never[2], (
        "the total variation is at most 1 at each position"
    )
    assert losses(loss="kl_div", tv_after=0.0) == always


def test_impossible_settings_are_refused(head_folder: Path) -> None:
    with pytest.raises(ValueError, match="Unknown loss"):
        small_settings(loss="mse")
    with pytest.raises(ValueError, match="nothing to learn from"):
        new_trainer(head_folder).train([], Budget(steps=1))

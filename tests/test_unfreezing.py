"""`add_module`, tables that are left out, and rates that look wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from maxfactor import AdaptiveSchedule, MaxFactor, for_model

transformers = pytest.importorskip("transformers")
SETTINGS = ("direction", "weight_decay", "scale", "momentum", "nesterov", "d")


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Linear(8, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 8),
        nn.Conv1d(8, 8, 1),
        nn.Linear(8, 3),
    ]
    return nn.Sequential(nn.Embedding(9, 8), *layers)


def kinds(optimizer: MaxFactor) -> dict[str, list[str]]:
    return {group["kind"]: group["param_names"] for group in optimizer.param_groups}


def step(model: nn.Module, optimizer: Any) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.step()


# ----------------------------------------------------------------------------------- add_module


@pytest.mark.parametrize("recipe", ["quality", "fast", "lean"])
def test_unfrozen_layers_get_the_groups_of_the_recipe(recipe: Any) -> None:
    model, whole = model_of(), for_model(model_of(), recipe)
    for index in (0, 1, 2, 4):
        model[index].requires_grad_(False)
    optimizer = for_model(model, recipe)
    assert kinds(optimizer) == {
        "hidden": ["3.weight"],
        "head": ["5.weight"],
        "vector": ["3.bias", "5.bias"],
    }
    model.requires_grad_(True)
    optimizer.add_module(model[1])
    assert kinds(optimizer)["hidden"] == ["3.weight", "1.weight"]
    optimizer.add_module(model)  # the rest
    assert {k: sorted(v) for k, v in kinds(optimizer).items()} == {
        k: sorted(v) for k, v in kinds(whole).items()
    }
    expected = {group["kind"]: group for group in whole.param_groups}
    for group in optimizer.param_groups:
        for name in ("lr", *SETTINGS):
            assert group[name] == expected[group["kind"]][name], (group["kind"], name)
    step(model, optimizer)
    assert len(optimizer.state) == len(list(model.parameters()))


def test_the_present_rate_is_kept() -> None:
    """In the group of the kind, and as the same fraction in a new group."""
    model = model_of()
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    optimizer = for_model(model, "fast")
    schedule = AdaptiveSchedule(optimizer, total_steps=10, decay_factor=0.5)
    for _ in range(10):
        step(model, optimizer)
        schedule.step()
    optimizer.add_module(model.requires_grad_(True))
    rates = {group["kind"]: (group["initial_lr"], group["lr"]) for group in optimizer.param_groups}
    assert rates["hidden"] == pytest.approx((0.08, 0.04))
    assert rates["embedding"] == pytest.approx((0.04, 0.02))  # half the rate, as in the recipe
    step(model, optimizer)
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx(
        [group["lr"] for group in optimizer.param_groups]
    )
    assert dict(zip(kinds(optimizer), schedule.get_last_lr(), strict=True))["embedding"] == 0.02


def test_a_shared_tensor_stays_shared() -> None:
    model = model_of()
    model[0].requires_grad_(False)
    rate = torch.tensor(0.01)
    optimizer = for_model(model, "lean", lr=rate)
    optimizer.add_module(model[0].requires_grad_(True))
    assert all(group["lr"] is rate for group in optimizer.param_groups)


def test_checkpoints_of_added_parameters() -> None:
    def resumed() -> tuple[nn.Module, MaxFactor]:
        model = model_of()
        model[0].requires_grad_(False)
        model[1].requires_grad_(False)
        optimizer = for_model(model, "quality")
        optimizer.add_module(model[:2].requires_grad_(True))
        return model, optimizer

    model, optimizer = resumed()
    step(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step(model, optimizer)
    again, loaded = resumed()
    again.load_state_dict(saved[0])
    loaded.load_state_dict(saved[1])
    step(again, loaded)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_errors_change_nothing() -> None:
    model = model_of()
    optimizer = for_model(model, "lean")
    groups = kinds(optimizer)
    with pytest.raises(ValueError, match="no trainable parameters that are new to the optimizer"):
        optimizer.add_module(model[1])
    with pytest.raises(ValueError, match=r"has 2 parameters that are not in the model .*\(2, 3\)"):
        optimizer.add_module(nn.Linear(3, 2))
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got Parameter"):
        optimizer.add_module(model[1].weight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"made by maxfactor\.for_model.*add_param_group"):
        MaxFactor(model.parameters()).add_module(model[1])
    model.add_module("new", nn.Linear(8, 4, dtype=torch.complex64))
    with pytest.raises(TypeError, match="complex64"):
        optimizer.add_module(model.get_submodule("new"))
    assert kinds(optimizer) == groups
    step(model[:6], optimizer)


def test_without_groups_of_the_recipe_its_own_rate_is_taken() -> None:
    """There is nothing whose rate a schedule could have changed."""
    model = model_of()
    optimizer = for_model(model, "lean")
    expected = {group["kind"]: group["lr"] for group in optimizer.param_groups}
    optimizer.param_groups.clear()
    optimizer.state.clear()
    optimizer.add_module(model)
    assert {group["kind"]: group["lr"] for group in optimizer.param_groups} == expected


def test_new_layers_of_the_model() -> None:
    model = model_of()
    optimizer = for_model(model, "lean")
    model.add_module("adapter", nn.Linear(8, 8))
    optimizer.add_module(model.get_submodule("adapter"))
    assert "adapter.weight" in kinds(optimizer)["hidden"]
    assert "5.weight" in kinds(optimizer)["head"]  # as decided before


# ------------------------------------------------------------------------------------ sinusoids


def whisper() -> Any:
    config = transformers.WhisperConfig(
        vocab_size=60, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16,
        max_source_positions=30, max_target_positions=20, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


TABLE = "model.encoder.embed_positions.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinusoids_of_a_loaded_whisper_are_left_out(tmp_path: Any, dtype: torch.dtype) -> None:
    whisper().save_pretrained(tmp_path)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype)
    model.get_parameter(TABLE).requires_grad_(True)  # as some versions of transformers leave it
    optimizer = for_model(model)
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert TABLE not in names
    assert "model.decoder.embed_positions.weight" in names
    described = optimizer.describe()
    assert list(described.left_out) == [TABLE]
    assert str(described).endswith(
        f"left out: {TABLE} (sinusoids of the encoder's positions, a table that is not trained)"
    )
    with pytest.raises(ValueError, match="no trainable parameters that are new"):
        optimizer.add_module(model.model.encoder)


def test_a_table_that_was_trained_is_a_weight() -> None:
    model = whisper()
    table = model.get_parameter(TABLE).requires_grad_(True)
    assert TABLE not in kinds(for_model(model))["embedding"]
    table.data += torch.randn(table.shape)
    optimizer = for_model(model)
    assert TABLE in kinds(optimizer)["embedding"]
    assert "left out" not in str(optimizer.describe())
    with torch.device("meta"):
        shapes_alone = whisper()
    shapes_alone.get_parameter(TABLE).requires_grad_(True)
    assert list(for_model(shapes_alone).describe().left_out) == [TABLE]


# ---------------------------------------------------------------------------------------- rates


@pytest.mark.parametrize("lr", [5e-5, 1e-4, torch.tensor(1e-5)])
def test_rates_of_adamw_get_a_warning(lr: Any) -> None:
    with pytest.warns(UserWarning, match=r"looks like a rate for AdamW.*recipe's own, 0\.04") as w:
        for_model(nn.Linear(2, 2), "lean", lr=lr)
    assert w[0].filename == __file__


def test_rates_above_one_get_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"lr=5 .*cannot train; leave lr out .* 0\.04$"):
        for_model(nn.Linear(2, 2), lr=5.0)


@pytest.mark.parametrize(
    ("lr", "message"),
    [
        (5e-5, r"lr=5e-05 looks like a rate for AdamW.*; leave lr out for the default, 0\.01, or"),
        (torch.tensor(5.0), r"lr=5 .*cannot train; leave lr out for the default, 0\.01$"),
    ],
)
def test_maxfactor_itself_warns_once(lr: Any, message: str) -> None:
    """Not of groups, whose rates may be small, nor when a state is loaded or copied."""
    param = nn.Parameter(torch.ones(2, 2))
    with pytest.warns(UserWarning, match=message) as w:
        optimizer = MaxFactor([param], lr=lr)
    assert [each.filename for each in w] == [__file__]
    other = MaxFactor([{"params": [param], "lr": 1e-5}])
    other.load_state_dict(optimizer.state_dict())
    assert float(copy.deepcopy(optimizer).param_groups[0]["lr"]) == float(lr)
    assert float(other.param_groups[0]["lr"]) == float(lr)
    MaxFactor([param], lr=0.0)


@pytest.mark.parametrize("lr", [None, 0.0, 2e-4, 1.0])
def test_other_rates_get_none(lr: Any) -> None:
    optimizer = for_model(nn.Linear(2, 2), lr=lr)
    AdaptiveSchedule(optimizer, warmup_steps=1000)  # starts at a thousandth

"""`for_model`: parameters in groups by the layers that own them, with a recipe's settings."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import weight_norm
from transformers.pytorch_utils import Conv1D

from maxfactor import FAM, MaxFactor, Switches, for_model, recipe, release_gradients
from maxfactor.recipes import OWN, PUBLISHED, Recipe
from maxfactor.settings import MaxFactorSettings


def groups_of(model: nn.Module) -> dict[str, list[str]]:
    optimizer = for_model(model, recipe="published-1.0")
    return {group["kind"]: group["param_names"] for group in optimizer.param_groups}


def kind_of(model: nn.Module, name: Any) -> str:
    return next(kind for kind, names in groups_of(model).items() if name in names)


class Decoder(nn.Module):
    """A positional table beside layers, as in many models; the head comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(16, 40)
        self.tokens = nn.Embedding(40, 16)
        self.positions = nn.Parameter(torch.randn(12, 16))
        self.scale = nn.Parameter(torch.ones(1))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32)


class Own(nn.Module):
    """A module with nothing but one parameter."""

    def __init__(self, *shape: int, name: str = "weight") -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.randn(shape)))


class Norm(nn.Module):
    """A norm of a model's own, of a width that nothing else takes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


# ------------------------------------------------------------------------------- kinds


def test_transformer() -> None:
    groups = groups_of(nn.Transformer(16, 2, 1, 1, 32, batch_first=True))
    assert groups["hidden"] == [
        "encoder.layers.0.self_attn.in_proj_weight",
        "encoder.layers.0.self_attn.out_proj.weight",
        "encoder.layers.0.linear1.weight",
        "encoder.layers.0.linear2.weight",
        "decoder.layers.0.self_attn.in_proj_weight",
        "decoder.layers.0.self_attn.out_proj.weight",
        "decoder.layers.0.multihead_attn.in_proj_weight",
        "decoder.layers.0.multihead_attn.out_proj.weight",
        "decoder.layers.0.linear1.weight",
        "decoder.layers.0.linear2.weight",
    ]
    assert set(groups) == {"hidden", "vector"}
    assert all("bias" in name or "norm" in name for name in groups["vector"])


def test_a_model_of_ones_own() -> None:
    groups = groups_of(Decoder())
    assert groups["head"] == ["output.weight"]
    assert groups["embedding"] == ["positions", "tokens.weight"]
    assert groups["hidden"] == [
        "layer.self_attn.in_proj_weight",
        "layer.self_attn.out_proj.weight",
        "layer.linear1.weight",
        "layer.linear2.weight",
    ]
    assert groups["vector"][0] == "scale"


@pytest.mark.parametrize(
    ("layer", "name", "kind"),
    [
        (nn.Conv1d(8, 8, 3, groups=8), "weight", "conv"),
        (nn.Conv1d(8, 8, 1, groups=2), "weight", "conv"),
        (nn.Conv2d(8, 8, (1, 3)), "weight", "conv"),
        # The same as a linear layer: the only one is a head.
        (nn.Conv1d(8, 8, 1), "weight", "head"),
        (nn.ConvTranspose2d(8, 6, 1), "weight", "head"),
        (nn.ConvTranspose2d(2, 3, 3), "weight", "conv"),
        (nn.Conv1d(8, 8, 3), "bias", "vector"),
        (weight_norm(nn.Conv1d(8, 8, 3)), "parametrizations.weight.original0", "vector"),
        (weight_norm(nn.Conv1d(8, 8, 3)), "parametrizations.weight.original1", "conv"),
        (weight_norm(nn.Conv1d(8, 6, 1)), "parametrizations.weight.original1", "head"),
        (nn.EmbeddingBag(10, 4), "weight", "embedding"),
        (nn.Embedding(1, 4), "weight", "embedding"),
        (nn.LSTM(4, 6), "weight_ih_l0", "hidden"),
        (nn.LSTM(4, 6), "bias_ih_l0", "vector"),
        (nn.MultiheadAttention(8, 2, kdim=6, vdim=6), "k_proj_weight", "hidden"),
        (nn.MultiheadAttention(8, 2, add_bias_kv=True), "bias_k", "vector"),
        (nn.LayerNorm((4, 6)), "weight", "vector"),
        (nn.RMSNorm((4, 6)), "weight", "vector"),
        (nn.BatchNorm1d(4), "weight", "vector"),
        (nn.PReLU(4), "weight", "vector"),
        (Own(), "weight", "vector"),
        (Own(7), "weight", "vector"),
        (Own(1, 7, 1), "weight", "vector"),
        (Own(5, 7), "weight", "hidden"),
        (Own(1, 5, 7), "weight", "embedding"),
        (Own(3, 5, 7), "weight", "tensor"),
        # By name, if it is a matrix: a linear layer of one's own, or something else.
        (Own(5, 7, name="in_proj_weight"), "in_proj_weight", "hidden"),
        (Own(5, 7, name="W1"), "W1", "hidden"),
        (Own(5, 7, name="Wqkv"), "Wqkv", "hidden"),
        (Own(5, 7, name="qkvWeight"), "qkvWeight", "hidden"),
        (Own(5, 7, name="kernel"), "kernel", "hidden"),
        (Own(5, 7, name="text_projection"), "text_projection", "hidden"),
        (nn.LSTMCell(4, 6), "weight_ih", "hidden"),
        (Own(5, 7, name="log_A_real"), "log_A_real", "embedding"),
        (Own(5, 7, name="window"), "window", "embedding"),
        (Own(3, 5, 7, name="C"), "C", "tensor"),
        (Own(3, 7, name="bias"), "bias", "vector"),
        (Own(3, 1, 7, name="down_proj_bias"), "down_proj_bias", "vector"),
        (Own(3, 7, name="expert_biases"), "expert_biases", "vector"),
        (Own(9, 4, name="position_bias_table"), "position_bias_table", "embedding"),
        (weight_norm(Own(5, 7)), "parametrizations.weight.original1", "hidden"),
    ],
)
def test_a_layer(layer: nn.Module, name: Any, kind: str) -> None:
    assert kind_of(layer, name) == kind


def test_lists_of_parameters() -> None:
    """They belong to the module that holds the list: tables beside layers, or its weights."""
    tables = nn.ParameterList([torch.randn(9, 8), torch.randn(8)])
    nested = nn.ParameterDict({"tables": nn.ParameterList([torch.randn(9, 8)])})
    model = nn.ModuleDict({"tables": tables, "nested": nested, "layer": nn.Linear(8, 8)})
    found = groups_of(nn.ModuleList([model, nn.Linear(8, 3)]))
    assert found["embedding"] == ["0.tables.0", "0.nested.tables.0"]
    assert found["vector"] == ["0.tables.1", "0.layer.bias", "1.bias"]
    weights = nn.ModuleDict({"weights": nn.ParameterList([torch.randn(9, 8)])})
    assert kind_of(weights, "weights.0") == "hidden"
    experts = nn.ParameterDict({"weight": torch.randn(8, 9), "bias": torch.randn(4, 8)})
    assert kind_of(nn.ModuleDict({"p": experts}), "p.bias") == "vector"


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        # The last linear layer, if its width goes nowhere.
        ([nn.Linear(8, 8), nn.Linear(8, 30)], ["hidden", "head"]),
        ([nn.Linear(4, 8), nn.Linear(8, 1)], ["hidden", "head"]),
        ([nn.Linear(6, 6)], ["head"]),
        ([weight_norm(nn.Linear(4, 8)), weight_norm(nn.Linear(8, 30))], ["hidden", "head"]),
        ([nn.Linear(4, 8), nn.Linear(8, 30), Norm(30)], ["hidden", "hidden", "vector"]),
        ([nn.Linear(4, 8), nn.Linear(8, 30), nn.BatchNorm1d(30)], ["hidden", "hidden", "vector"]),
        ([nn.Linear(4, 8), nn.Linear(8, 30), nn.Conv1d(30, 2, 3)], ["hidden", "hidden", "conv"]),
        ([nn.Linear(8, 24), nn.Linear(8, 8)], ["hidden", "hidden"]),
        # A convolution with a kernel of one is a linear layer.
        ([nn.Conv1d(8, 16, 1), nn.Conv1d(16, 30, 1)], ["hidden", "head"]),
        ([nn.Conv1d(4, 8, 3), nn.Conv1d(8, 8, 1), nn.Linear(8, 9)], ["conv", "hidden", "head"]),
        # As wide as a vocabulary, wherever it stands: a head for CTC beside the decoder's.
        (
            [nn.Linear(8, 30), nn.Embedding(30, 8), nn.Linear(8, 30), nn.Linear(8, 8)],
            ["head", "embedding", "head", "hidden"],
        ),
        # As wide as the model's input: nothing but the first convolution takes that.
        ([nn.Conv2d(3, 8, 3), nn.Linear(8, 6), nn.Linear(6, 3)], ["conv", "hidden", "head"]),
        ([nn.Conv1d(1, 8, 3), nn.Conv1d(8, 8, 3), nn.Linear(8, 1)], ["conv", "conv", "head"]),
        (
            [nn.Conv1d(6, 8, 3), nn.Conv1d(8, 6, 3), nn.Conv1d(6, 8, 3), nn.Linear(8, 6)],
            ["conv", "conv", "conv", "hidden"],
        ),
        # As wide as a table is long, but an activation like any other.
        (
            [nn.Embedding(16, 8), nn.Linear(8, 16), nn.Linear(16, 8)],
            ["embedding", "hidden", "hidden"],
        ),
    ],
)
def test_heads(model: list[nn.Module], kinds: list[str]) -> None:
    found = groups_of(nn.Sequential(*model))
    for index, kind in enumerate(kinds):
        weights = (f"{index}.weight", f"{index}.parametrizations.weight.original1")
        assert set(weights) & set(found[kind]), (index, kind, found)


@pytest.mark.parametrize("container", [nn.Sequential, lambda *blocks: nn.ModuleList(blocks)])
def test_repeated_blocks_have_no_heads(container: Any) -> None:
    """A gated layer as wide as the vocabulary; nothing takes that width, as the gate halves it."""
    blocks = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GLU()) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(32, 16), container(*blocks), nn.Linear(16, 32))
    found = groups_of(model)
    assert found["hidden"] == ["1.0.1.weight", "1.1.1.weight", "1.2.1.weight"]
    assert found["head"] == ["2.weight"]


def test_equal_models_and_equal_heads_are_no_blocks() -> None:
    """A student with its frozen teacher, two towers, and several heads of two layers each."""

    def language_model() -> nn.Sequential:
        return nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32))

    pair = nn.ModuleDict({"student": language_model(), "teacher": language_model()})
    assert groups_of(pair)["head"] == ["student.2.weight", "teacher.2.weight"]
    pair["teacher"].requires_grad_(False)
    assert groups_of(pair)["head"] == ["student.2.weight"]
    heads = [nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 32)) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.ModuleList(heads))
    assert groups_of(model)["head"] == ["2.0.2.weight", "2.1.2.weight", "2.2.2.weight"]


def test_a_head_for_each_task() -> None:
    def heads_of(*layers: nn.Module) -> list[str]:
        return groups_of(nn.ModuleList([nn.Conv2d(3, 16, 3), nn.ModuleList(layers)]))["head"]

    tasks = nn.Linear(16, 5), nn.Linear(16, 3), nn.Linear(16, 5)  # three, as many as colours
    assert heads_of(*tasks) == ["1.0.weight", "1.1.weight", "1.2.weight"]
    assert heads_of(nn.ModuleDict({"tag": nn.Linear(16, 5), "name": nn.Linear(16, 7)})) == [
        "1.0.tag.weight",
        "1.0.name.weight",
    ]
    layers = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 5)  # one after the other
    assert heads_of(*layers) == ["1.2.weight"]


def test_a_head_beside_its_backbone() -> None:
    """Whatever its width is; wrappers, norms and dropout do not count."""

    def encoder() -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 32)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    layers = [nn.Linear(5, 16), encoder(), nn.LayerNorm(16), nn.Dropout(), nn.Linear(16, 16)]
    assert groups_of(nn.Sequential(*layers))["head"] == ["4.weight"]
    assert groups_of(nn.ModuleDict({"net": nn.Sequential(*layers)}))["head"] == ["net.4.weight"]
    for others in (
        [encoder(), encoder()],
        [encoder(), nn.Linear(16, 16), encoder()],
        [encoder(), nn.Linear(16, 32), nn.Linear(32, 16)],  # as in a feed-forward block
        [nn.LSTM(16, 16), nn.Linear(16, 16)],
        [nn.MultiheadAttention(16, 2), nn.Linear(16, 16)],
    ):
        assert "head" not in groups_of(nn.Sequential(*others))
    block = nn.Sequential(encoder(), nn.Linear(16, 16))
    assert "head" not in groups_of(nn.ModuleDict({"blocks": nn.ModuleList([block])}))


def test_a_model_may_name_its_head() -> None:
    class Named(nn.Sequential):
        def get_output_embeddings(self) -> nn.Module:
            return self[0]

    found = groups_of(nn.ModuleDict({"inner": Named(nn.Linear(8, 8), nn.Linear(8, 8))}))
    assert found["head"] == ["inner.0.weight"]
    assert found["hidden"] == ["inner.1.weight"]


def test_tied_weights_once() -> None:
    model = nn.Sequential(nn.Linear(8, 30, bias=False), nn.Embedding(30, 8), nn.Linear(8, 8))
    model[0].weight = model[1].weight
    assert groups_of(model) == {
        "hidden": ["2.weight"],
        "embedding": ["0.weight"],
        "vector": ["2.bias"],
    }


def test_frozen_layers_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    model[2].requires_grad_(False)
    assert groups_of(model) == {
        "hidden": ["0.weight", "1.weight"],
        "vector": ["0.bias", "1.bias"],
    }


# ------------------------------------------------------------------- where the model is


def test_meta_device() -> None:
    with torch.device("meta"):
        model = Decoder()
    assert groups_of(model) == groups_of(Decoder())


def test_compiled() -> None:
    model = Decoder()
    expected = groups_of(model)
    assert groups_of(torch.compile(model, backend="eager")) == expected  # type: ignore[arg-type]
    model.layer = torch.compile(model.layer, backend="eager")  # type: ignore[assignment]
    assert groups_of(model) == expected


@pytest.mark.usefixtures("one_rank")
def test_data_parallel() -> None:
    model = Decoder()
    expected = groups_of(model)
    assert groups_of(nn.DataParallel(model)) == expected
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert groups_of(wrapped) == expected
    assert groups_of(torch.compile(wrapped, backend="eager")) == expected  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_rank")
def test_fully_shard() -> None:
    model = Decoder()
    expected, rows = groups_of(model), for_model(model).describe()
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model.layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model.positions, DTensor)
    assert groups_of(model) == expected
    assert for_model(model).describe() == rows


@pytest.mark.usefixtures("one_rank")
def test_flat_parameters_are_refused() -> None:
    flat = FullyShardedDataParallel(
        nn.Linear(2, 2),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        device_id=torch.device("cpu"),
    )
    with pytest.raises(ValueError, match=r"'1' is wrapped by .* shard with .*fully_shard"):
        for_model(nn.Sequential(nn.Linear(2, 2), flat), recipe="published-1.0")


# --------------------------------------------------------------------- names and settings


def test_names_reach_errors() -> None:
    model = Decoder()
    optimizer = for_model(model, recipe="published-1.0", nonfinite="raise")
    model.positions.grad = torch.full_like(model.positions, torch.nan)
    with pytest.raises(FloatingPointError, match="'positions' is not finite"):
        optimizer.step()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_versions(name: Any) -> None:
    """The recipe's settings in every group, but no decay of vectors."""
    optimizer = for_model(Decoder(), recipe=name)
    expected = MaxFactorSettings(**recipe(name)).as_group()
    for group in optimizer.param_groups:
        decay = 0.0 if group["kind"] == "vector" else expected["weight_decay"]
        settings = {key: group[key] for key in expected}
        assert settings == {**expected, "weight_decay": decay}
    assert isinstance(optimizer, MaxFactor)


def settings_by_kind(name: Any, *settings: str, **overrides: Any) -> dict[str, list[Any]]:
    groups = for_model(Decoder(), recipe=name, **overrides).param_groups
    return {group["kind"]: [group[setting] for setting in settings] for group in groups}


def test_lean() -> None:
    found = settings_by_kind("lean", "direction", "momentum", "weight_decay", "lr")
    assert found == {kind: ["factored", None, 0.0, 0.04] for kind in found}
    scales = settings_by_kind("lean", "scale")
    assert scales == {
        "hidden": ["current"], "embedding": ["raised"], "head": ["raised"], "vector": ["current"],
    }  # fmt: skip


@pytest.mark.parametrize(("name", "lr"), [("quality", 0.04), ("fast", 0.04), ("lean", 0.04)])
def test_convolutions_are_orthogonal(name: Any, lr: float) -> None:
    """In every recipe of our own, with the same rate; other tensors of their shape are not."""
    model = nn.Sequential(nn.Conv1d(8, 8, 3), Own(4, 6, 8), nn.Linear(8, 8), nn.Linear(8, 5))
    groups = {group["kind"]: group for group in for_model(model, recipe=name).param_groups}
    conv = groups["conv"]
    assert (conv["direction"], conv["momentum"], conv["nesterov"]) == ("orthogonal", 0.9, True)
    assert (conv["momentum_dtype"], conv["scale"], conv["lr"]) == ("int8", "raised", lr)
    assert groups["tensor"]["direction"] == "factored"


def test_fam() -> None:
    found = settings_by_kind(
        "fast", "direction", "momentum", "momentum_dtype", "weight_decay", "lr"
    )
    common = ["factored", asdict(FAM(beta_max=0.84)), "int8"]
    assert found == {
        "hidden": [*common, 0.01, 0.08],
        "embedding": [*common, 0.01, 0.04],
        "head": [*common, 0.01, 0.04],
        "vector": [*common, 0.0, 0.02],
    }
    assert all(d == [math.inf] for d in settings_by_kind("fast", "d").values())


def test_speech() -> None:
    found = settings_by_kind("quality", "direction", "momentum", "nesterov", "weight_decay", "lr")
    adaptive = asdict(FAM(beta_max=0.92))
    others = ["factored", adaptive, False, 0.03, 0.04]
    assert found == {
        "hidden": ["orthogonal", 0.9, True, 0.06, 0.04],
        "embedding": others,
        "head": others,
        "vector": ["factored", adaptive, False, 0.0, 0.01],
    }
    assert all(d == [math.inf] for d in settings_by_kind("quality", "d").values())


@pytest.mark.parametrize(("name", "hidden"), [("fast", "initial"), ("quality", "usual")])
def test_recipes_scale_by_the_initial_size(name: Any, hidden: str) -> None:
    scales = settings_by_kind(name, "scale")
    assert scales.pop("vector") == ["current"]
    assert scales.pop("hidden") == [hidden]
    assert all(scale == ["raised"] for scale in scales.values())


@pytest.mark.parametrize("name", ["fast", "quality"])
def test_decay_does_not_outgrow_the_step(name: Any) -> None:
    """600 steps of noise at a constant rate: weights keep their size, and the move falls."""
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 4))
    weight, optimizer = layer.get_parameter("0.weight"), for_model(layer, recipe=name, lr=0.2)
    first, moves = weight.detach().norm().item(), {}
    for t in range(1, 601):
        before = weight.detach().clone()
        for param in layer.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
        moves[t] = ((weight.detach() - before).norm() / before.norm()).item()
    assert 1.0 < weight.detach().norm().item() / first < 5.0
    assert sum(moves[t] for t in range(551, 601)) < 0.5 * sum(moves[t] for t in range(51, 101))


@pytest.mark.parametrize("name", ["fast", "quality", "lean"])
def test_a_recipe_by_layers_needs_a_model(name: Any) -> None:
    with pytest.raises(ValueError, match=r"different layers; use maxfactor.for_model\(model, rec"):
        recipe(name)


def test_an_lr_keeps_the_shares_of_the_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    halved = Recipe({**OWN["lean"].common, "lr_share": 0.5}, {"hidden": {"lr_share": 1.0}})
    monkeypatch.setitem(cast("dict[str, Recipe]", OWN), "halved", halved)
    found = settings_by_kind("halved", "lr", lr=0.4)
    assert found == {"hidden": [0.4], "embedding": [0.2], "head": [0.2], "vector": [0.2]}


def test_a_tensor_lr_is_followed_by_every_group_or_refused() -> None:
    tensor = torch.tensor(0.5)
    groups = for_model(Decoder(), recipe="lean", lr=tensor).param_groups
    assert all(group["lr"] is tensor for group in groups)
    message = r"recipe 'fast' takes shares of it \(embedding 0.5, head 0.5, vector 0.25\)"
    with pytest.raises(ValueError, match=message):
        for_model(Decoder(), recipe="fast", lr=tensor)


def test_another_momentum_takes_the_look_ahead_away() -> None:
    for momentum in (None, FAM(bands=2)):
        found = settings_by_kind("quality", "nesterov", "direction", momentum=momentum)
        assert found["hidden"] == [False, "orthogonal"]
    found = settings_by_kind("quality", "nesterov", "momentum", momentum=0.8)
    assert found["hidden"] == [True, 0.8]
    assert found["embedding"] == [False, 0.8]


@pytest.mark.parametrize("recipe", ["fast", "quality"])
def test_without_momentum_the_update_is_clipped_again(recipe: Any) -> None:
    """Only the filter's input is bounded."""
    assert all(d == [1.0] for d in settings_by_kind(recipe, "d", momentum=None).values())
    assert all(d == [math.inf] for d in settings_by_kind(recipe, "d", momentum=0.8).values())
    stores = settings_by_kind(recipe, "momentum_dtype", momentum=None)
    assert all(store == [None] for store in stores.values())
    found = settings_by_kind(recipe, "d", momentum=None, d=3.0)
    assert all(d == [3.0] for d in found.values())


def test_a_group_added_later_has_the_common_settings() -> None:
    optimizer = for_model(Decoder(), recipe="quality")
    optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(3, 2)))]})
    assert optimizer.param_groups[-1]["momentum"] == asdict(FAM(beta_max=0.92))
    assert optimizer.param_groups[-1]["direction"] == "factored"


def test_overrides() -> None:
    optimizer = for_model(
        Decoder(), recipe="published-1.0", lr=0.5, weight_decay=0.3, d=2.0, foreach=True
    )
    for group in optimizer.param_groups:
        assert group["lr"] == 0.5
        assert group["d"] == 2.0
        assert group["foreach"] is True
        assert group["weight_decay"] == (0.0 if group["kind"] == "vector" else 0.3)


def test_a_tensor_as_lr_stays_the_callers() -> None:
    lr = torch.tensor(0.1)
    optimizer = for_model(Decoder(), recipe="published-1.0", lr=lr)
    assert all(group["lr"] is lr for group in optimizer.param_groups)


def test_kinds_go_through_checkpoints() -> None:
    optimizer = for_model(Decoder(), recipe="published-1.0")
    saved = copy.deepcopy(optimizer.state_dict())
    kinds = [group["kind"] for group in saved["param_groups"]]
    assert kinds == ["hidden", "embedding", "head", "vector"]
    other = for_model(Decoder(), recipe="published-1.0")
    other.load_state_dict(saved)
    assert [group["kind"] for group in other.param_groups] == kinds


@pytest.mark.parametrize(
    ("model", "settings", "error", "message"),
    [
        (nn.ReLU(), {}, ValueError, "ReLU has no trainable parameters; call requires_grad_"),
        (nn.Linear(2, 2).requires_grad_(False), {}, ValueError, "no trainable parameters"),
        (nn.Linear(2, 2).parameters(), {}, TypeError, "must be a torch.nn.Module, got generator"),
        (nn.LazyLinear(2), {}, ValueError, "'weight' has no shape yet; run one batch"),
        (
            nn.Linear(2, 2),
            {"recipe": "2.0"},
            ValueError,
            "unknown recipe '2.0'; known.*'published-1.0'",
        ),
        (
            nn.Linear(2, 2),
            {"weigth_decay": 0.1},
            TypeError,
            "no setting 'weigth_decay'; known settings: beta2_decay, .*fused, .*weight_decay",
        ),
        (nn.Linear(2, 2), {"params": []}, TypeError, "no setting 'params'"),
        (nn.Linear(2, 2), {"recipe": "quality", "lr": "1e-3"}, TypeError, "lr must be a number"),
        (nn.Linear(2, 2), {"lr": -1.0}, ValueError, "lr must be finite and not negative"),
        (
            nn.Linear(2, 2),
            {"recipe": "quality", "switches": {"clip_threshold": 1.0}},
            ValueError,
            "clip_threshold=1.0 cannot be combined with momentum",
        ),
        (nn.Linear(2, 2), {"recipe": "quality", "nesterov": True}, ValueError, "nesterov=False"),
        (nn.Linear(2, 2), {"d": 0.0}, ValueError, "d must be positive"),
        (nn.Linear(2, 2, dtype=torch.complex64), {}, TypeError, "'weight' is torch.complex64"),
    ],
)
def test_bad_input(
    model: Any, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        for_model(model, **{"recipe": "published-1.0", **settings})


# ----------------------------------------------------------- what is small on purpose in `quality`


def scaled_layers(*sizes: float) -> torch.nn.Sequential:
    """Linear layers, each with an RMS of so many times what torch begins with."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32, bias=False) for _ in sizes]
    for layer, size in zip(layers, sizes, strict=True):
        weight = layer.weight.data
        weight.mul_(size / (weight.square().mean().sqrt() * math.sqrt(3 * 32)))
    return torch.nn.Sequential(*layers, torch.nn.Linear(32, 2))


def usual_from(optimizer: Any) -> float:
    optimizer.look_at_weights()  # as the first step does
    [found] = {g["switches"]["usual_from"] for g in optimizer.param_groups if g["kind"] == "hidden"}
    return float(found)


def step_sizes(model: torch.nn.Module, optimizer: Any) -> list[float]:
    """The step of each hidden matrix, in units of what torch's own size gives."""
    optimizer.record_metrics(None)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    steps = [each.step_size for each in optimizer.metrics().values() if each.kind == "hidden"]
    return [step / 0.04 * math.sqrt(3 * 32) for step in steps]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1.0, 1.0, 0.8, 0.5), (1.0, 1.0, 1.0, 0.5)),
        ((0.2, 0.2, 0.19, 0.1), (1.0, 1.0, 1.0, 0.1)),  # a narrow model, with a residual projection
        ((1.7, 1.7, 1.6, 0.4), (1.7, 1.7, 1.6, 0.4)),  # a T5, with queries
        ((0.3, 0.3, 0.3, 0.0), (1.0, 1.0, 1.0, 1.0)),  # what begins at zero has no size at all
    ],
)
def test_small_on_purpose_is_clearly_smaller_than_others(
    sizes: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model = scaled_layers(*sizes).to(dtype)
        assert step_sizes(model, for_model(model)) == pytest.approx(expected, rel=1e-2)


def prepared_by_accelerate(model: torch.nn.Module, optimizer: Any) -> Any:
    """Its wrapper loads the optimizer's own state."""
    optimizer.load_state_dict(optimizer.state_dict())
    return optimizer


def rehearsed(model: torch.nn.Module, optimizer: Any) -> Any:
    get_optimizer_state_dict(model, optimizer)  # takes a step with lr = 0
    return optimizer


def stepped_without_gradients(model: torch.nn.Module, optimizer: Any) -> Any:
    optimizer.step()
    return optimizer


def resumed_from_nothing(model: torch.nn.Module, optimizer: Any) -> Any:
    other = for_model(model)
    other.load_state_dict(optimizer.state_dict())
    return other


def settings_were_asked_for(model: torch.nn.Module, optimizer: Any) -> Any:
    optimizer.group_steps()
    optimizer.describe()
    return optimizer


BEFORE_THE_FIRST_STEP = [
    prepared_by_accelerate, rehearsed, stepped_without_gradients, resumed_from_nothing,
    settings_were_asked_for,
]  # fmt: skip


@pytest.mark.parametrize("happens", BEFORE_THE_FIRST_STEP)
def test_sizes_are_judged_at_the_first_step(happens: Callable[..., Any]) -> None:
    """Weights may be loaded, broadcast or sharded after the optimizer was built."""
    model = scaled_layers(1.0, 1.0)
    optimizer = happens(model, for_model(model))
    model.load_state_dict(scaled_layers(0.2, 0.2).state_dict())
    assert step_sizes(model, optimizer) == pytest.approx([1.0, 1.0], rel=1e-3)
    assert usual_from(optimizer) == pytest.approx(0.2 * 2 / 3, rel=1e-3)
    for param in model.parameters():
        param.data.mul_(4.0)
    assert usual_from(optimizer) == pytest.approx(0.2 * 2 / 3, rel=1e-3)  # once for the training


def by_pickle(both: Any) -> Any:
    file = io.BytesIO()
    torch.save(both, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
def test_a_copy_judges_sizes_too(copied: Callable[[Any], Any]) -> None:
    model = scaled_layers(0.2, 0.2, 0.1)
    assert step_sizes(*copied((model, for_model(model)))) == pytest.approx(
        [1.0, 1.0, 0.1], rel=0.01
    )


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
def test_a_copy_knows_its_model(copied: Callable[[Any], Any]) -> None:
    model = scaled_layers(1.7, 1.7, 1.6, 0.4)
    model[:3].requires_grad_(requires_grad=False)
    other, optimizer = copied((model, for_model(model)))
    assert step_sizes(other, optimizer) == pytest.approx([0.4], rel=1e-3)  # frozen ones count, too
    optimizer.add_module(other[0].requires_grad_(requires_grad=True))
    assert len(step_sizes(other, optimizer)) == 2


def test_a_group_of_hidden_matrices_that_was_inserted_by_hand() -> None:
    model = scaled_layers(1.0, 1.0)
    optimizer: Any = for_model(model)
    group = optimizer.param_groups[0]
    added = {"params": [group["params"].pop()], "param_names": [group["param_names"].pop()]}
    optimizer.param_groups.append({**added, "lr": 0.01, "kind": "hidden"})
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()  # with the defaults of the class
    assert len(optimizer.state) == len(list(model.parameters()))


def test_frozen_matrices_are_others_too() -> None:
    """Else the one that is trained, such as a T5's queries, would be as large as the median."""
    model = scaled_layers(1.7, 1.7, 1.6, 0.4)
    model[:3].requires_grad_(requires_grad=False)
    optimizer = for_model(model)
    assert step_sizes(model, optimizer) == pytest.approx([0.4], rel=1e-3)
    other = scaled_layers(1.7, 1.7, 1.6, 0.4)
    other[3].requires_grad_(requires_grad=False)
    optimizer = for_model(other)
    step_sizes(other, optimizer)
    optimizer.add_module(other[3].requires_grad_(requires_grad=True))
    assert step_sizes(other, optimizer)[3] == pytest.approx(0.4, rel=1e-3)


def test_matrices_of_gpt2_have_their_inputs_first() -> None:
    """Sizes from shapes are those of the same layers as torch stores them."""
    found = []
    for is_transposed in (True, False):
        torch.manual_seed(0)
        shapes = [(32, 96), (32, 32), (32, 128), (128, 32)]  # inputs and outputs
        layers: list[nn.Module] = [Conv1D(outputs, inputs) for inputs, outputs in shapes]
        if not is_transposed:
            for i, (layer, (inputs, outputs)) in enumerate(zip(list(layers), shapes, strict=True)):
                layers[i] = nn.Linear(inputs, outputs)
                layers[i].weight = nn.Parameter(cast(Tensor, layer.weight).detach().T.contiguous())
        model = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})
        optimizer = for_model(model)
        hidden = [group for group in optimizer.param_groups if group["kind"] == "hidden"]
        assert [group["transposed"] for group in hidden] == [is_transposed]
        found.append((step_sizes(model, optimizer), usual_from(optimizer)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)
    whole = [math.sqrt(32 / inputs) for inputs in (32, 32, 32, 128)]
    assert found[0][0] == pytest.approx(whole, rel=1e-3)


def test_no_matrix_counts_as_more_than_ten_times_its_size() -> None:
    model = scaled_layers(0.05, 0.05, 0.12)
    assert step_sizes(model, for_model(model)) == pytest.approx([0.05, 0.05, 1.0], rel=1e-3)


def test_quantized_matrices_say_nothing() -> None:
    """A frozen layer of QLoRA has codes, whose size is not that of the weight."""
    model = scaled_layers(0.2, 0.2)
    codes = torch.nn.Parameter(torch.ones(32, 32, dtype=torch.uint8), requires_grad=False)
    model[0].register_parameter("weight", codes)
    assert usual_from(for_model(model)) == pytest.approx(0.2 * 2 / 3, rel=1e-3)


def test_released_gradients_judge_sizes_once() -> None:
    """In backward, before any window is stepped."""
    found = []
    for released in (False, True):
        model = scaled_layers(0.2, 0.2, 0.19, 0.1)
        optimizer = for_model(model)
        if released:
            release_gradients(model, optimizer)
        for _ in range(2):
            model(torch.randn(4, 32, generator=torch.Generator().manual_seed(0))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((usual_from(optimizer), dict(model.named_parameters())["0.weight"]))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_where_the_weights_say_nothing_a_third_is_on_purpose() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 2))
    assert usual_from(for_model(model)) == pytest.approx(1.0 / 3.0)
    model = scaled_layers(0.2, 0.2)
    for param in model.parameters():
        param.data.fill_(math.nan)
    assert usual_from(for_model(model)) == pytest.approx(1.0 / 3.0)
    with FakeTensorMode():
        model = scaled_layers(1.0)
        assert usual_from(for_model(model)) == pytest.approx(1.0 / 3.0)


def test_the_callers_switches_count() -> None:
    model = scaled_layers(0.2, 0.2)
    given: dict[str, Any] = {"decay_by": "squared_step"}
    for part in (0.5, 1.0 / 3.0):
        given["usual_from"] = part
        assert usual_from(for_model(model, switches=given)) == part
    del given["usual_from"]
    assert usual_from(for_model(model, switches=given)) == pytest.approx(0.2 * 2 / 3, rel=1e-3)


def test_shards_are_judged_as_the_whole_model(one_rank: None) -> None:
    model = scaled_layers(0.2, 0.2, 0.1)
    expected = usual_from(for_model(model))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert usual_from(for_model(model)) == pytest.approx(expected, rel=1e-6)


def test_an_optimizer_of_shards_can_be_copied(one_rank: None) -> None:
    """Its model cannot."""
    model = scaled_layers(0.2, 0.2, 0.1)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = for_model(model)
    assert usual_from(copy.deepcopy(optimizer)) == usual_from(optimizer)


def test_a_checkpoint_keeps_what_was_small_on_purpose() -> None:
    model = scaled_layers(0.2, 0.2)
    optimizer = for_model(model)
    step_sizes(model, optimizer)
    for param in model.parameters():
        param.data.mul_(4.0)
    resumed = for_model(model)
    resumed.load_state_dict(optimizer.state_dict())
    assert usual_from(resumed) == usual_from(optimizer)
    assert step_sizes(model, resumed) == pytest.approx([1.0, 1.0], rel=1e-3)


@pytest.mark.parametrize("usual", [0.0, 1.5, -1.0, math.nan])
def test_usual_from_is_a_part(usual: float) -> None:
    with pytest.raises(ValueError, match="usual_from must"):
        Switches(usual_from=usual)


class MixedBlock(nn.Module):
    """A block of a mixture model, which has experts or not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.Linear(16, 64)  # as wide as the vocabulary, by coincidence
        self.outside = nn.Linear(width, 16)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(MixedBlock(width) for width in (24, 48))
        self.head = nn.Linear(16, 64)


def test_blocks_of_a_list_may_differ_in_shape() -> None:
    model = Mixture()
    assert kind_of(model, "head.weight") == "head"
    assert kind_of(model, "blocks.0.inside.weight") == "hidden"

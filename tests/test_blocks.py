"""Blocks of the orthogonal direction: settings, heads of attention layers, checkpoints, memory.

The equations are compared with the oracle in `test_momentum.py`, backends with the rule in
`test_momentum_backends.py` and `test_fused_momentum.py`, shards in `test_sharded.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from cases import BLOCKS, problem
from maxfactor import MaxFactor, estimate_memory, for_model, release_gradients
from maxfactor.integrations.huggingface import MaxFactorCallback
from maxfactor.rule.newton_schulz import orthogonal
from maxfactor.settings import MaxFactorSettings
from maxfactor.state import block_shape
from test_groups_transformers import bert, conformer, gpt2, llama, wav2vec2, whisper

ORTHOGONAL: dict[str, Any] = {"direction": "orthogonal", "momentum": 0.9, "nesterov": True}


def optimizer_of(
    shape: tuple[int, ...], blocks: tuple[str, int] | None, **settings: Any
) -> MaxFactor:
    params = [(f"w{i}", nn.Parameter(problem(shape, seed=i).weight)) for i in range(2)]
    return MaxFactor([{"params": params, "blocks": blocks}], **ORTHOGONAL, **settings)


def take_steps(optimizer: MaxFactor, first: int, last: int) -> list[Tensor]:
    params: list[Tensor] = optimizer.param_groups[0]["params"]
    for t in range(first, last):
        for i, param in enumerate(params):
            param.grad = problem(tuple(param.shape), seed=i).grads[t]
        optimizer.step()
    return params


# ---------------------------------------------------------------------------- the direction


@pytest.mark.parametrize("name", BLOCKS)
def test_direction_is_that_of_separate_matrices(name: str) -> None:
    shape, (side, size) = BLOCKS[name]
    settings = MaxFactorSettings(direction="orthogonal", blocks=(side, size))  # type: ignore[arg-type]
    y = problem(shape).grads[0].flatten(1)
    dim = 0 if side == "rows" else 1
    parts = [orthogonal(part) for part in y.split(size, dim)]
    ours = orthogonal(y, block_shape(shape, settings.rules.matrix))
    torch.testing.assert_close(ours, torch.cat(parts, dim), rtol=1e-4, atol=1e-5)
    # Each block moves by alpha in RMS, and so does the whole matrix.
    sizes = torch.stack([part.square().mean().sqrt() for part in ours.split(size, dim)])
    torch.testing.assert_close(sizes, torch.ones_like(sizes))


@pytest.mark.parametrize("fused", [False, True])
def test_experts_in_one_tensor(fused: bool) -> None:
    """A tensor (experts, m, n) is cut into its experts by blocks of m rows."""
    optimizer = optimizer_of((3, 8, 12), ("rows", 8), fused=fused, weight_decay=0.0)
    before = [param.detach().clone() for param in optimizer.param_groups[0]["params"]]
    for old, new in zip(before, take_steps(optimizer, 0, 1), strict=True):
        change = (new.detach() - old) / optimizer.effective_lr()[0]
        sizes = change.square().mean((1, 2)).sqrt()  # of each expert
        torch.testing.assert_close(sizes, sizes[0].expand(3), rtol=1e-3, atol=0.0)
        values = torch.linalg.svdvals(change)  # nearly equal
        assert float((values[:, 0] / values[:, -1]).max()) < 2.0


def test_a_block_of_zeros_stays_zero() -> None:
    y = problem((12, 20)).grads[0]
    y[4:8] = 0.0
    o = orthogonal(y, (4, 20))
    assert torch.equal(o[4:8], torch.zeros(4, 20))
    assert float(o[:4].square().mean()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("blocks", "backend"),
    [
        (("rows", 8), {"fused": False}),
        (("rows", 8), {"foreach": True}),
        (("columns", 12), {"fused": False}),
        (("columns", 12), {"fused": True}),
    ],
    ids=str,
)
def test_one_block_is_the_whole_matrix(blocks: tuple[str, int], backend: dict[str, Any]) -> None:
    """Bit for bit."""
    ours, whole = (optimizer_of((8, 12), each, **backend) for each in (blocks, None))
    for one, other in zip(take_steps(ours, 0, 1), take_steps(whole, 0, 1), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("fused", [False, True])
def test_resumed_run(fused: bool) -> None:
    """The blocks are in the checkpoint, and a run that it resumes has the same bits."""
    whole, stopped = (optimizer_of((8, 12), ("columns", 6), fused=fused) for _ in range(2))
    take_steps(whole, 0, 2)
    before = take_steps(stopped, 0, 1)
    resumed = optimizer_of((8, 12), None, fused=fused)
    with torch.no_grad():
        for ours, theirs in zip(resumed.param_groups[0]["params"], before, strict=True):
            ours.copy_(theirs)
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.param_groups[0]["blocks"] == ("columns", 6)
    for one, other in zip(take_steps(resumed, 1, 2), take_steps(whole, 2, 2), strict=True):
        assert torch.equal(one, other)


def test_skipped_and_recorded_steps_of_the_kernels() -> None:
    """A step with a NaN changes nothing; what a recorded step measures is what W did."""
    optimizer = optimizer_of((8, 12), ("rows", 4), fused=True)
    params: list[Tensor] = optimizer.param_groups[0]["params"]
    before = [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.full_like(param, torch.nan)
    optimizer.step()
    assert optimizer.skipped == 1
    assert all(map(torch.equal, params, before))
    optimizer.record_metrics()
    take_steps(optimizer, 0, 1)
    plain = optimizer_of((8, 12), ("rows", 4), fused=False)
    for ours, theirs in zip(params, take_steps(plain, 0, 1), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    change = float((params[0].detach() - before[0]).square().mean().sqrt())
    assert optimizer.metrics()["w0"].update_rms == pytest.approx(change, rel=1e-5)


# ----------------------------------------------------------------------------- the setting


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (("rows", 5), "does not divide the 12 rows of parameter 'w0' (12, 20) as a matrix 12 x 20"),
        (("columns", 40), "give a number that divides 20, or put the parameter in a group without"),
        (("rows", 0), "the second entry of blocks must be at least 1, got 0"),
        (("heads", 4), "the first entry of blocks must be one of 'rows', 'columns', got 'heads'"),
        (64, "blocks must be None or a pair such as ('rows', 64), got 64"),
    ],
    ids=str,
)
def test_wrong_blocks_are_refused(blocks: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer_of((12, 20), blocks)
    # Also when they are set later; nothing changes then.
    optimizer = optimizer_of((12, 20), ["rows", 4])  # type: ignore[arg-type]  # of a config file
    take_steps(optimizer, 0, 1)
    before = [param.detach().clone() for param in optimizer.param_groups[0]["params"]]
    optimizer.param_groups[0]["blocks"] = blocks
    with pytest.raises(ValueError, match=re.escape(message)):
        take_steps(optimizer, 1, 2)
    assert all(map(torch.equal, before, optimizer.param_groups[0]["params"]))


def test_other_directions_have_no_blocks() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = MaxFactor([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=r"blocks=\('rows', 2\) is for direction='orthogonal'"):
        optimizer.add_param_group({"params": [weight], "blocks": ("rows", 2)})
    assert len(optimizer.param_groups) == 1


def test_blocks_of_a_checkpoint_that_do_not_fit() -> None:
    saved = optimizer_of((12, 20), ("rows", 4)).state_dict()
    saved["param_groups"][0]["blocks"] = ("rows", 5)
    optimizer = optimizer_of((12, 20), None)
    with pytest.raises(ValueError, match=r"group 0 are damaged: blocks=\('rows', 5\) does not"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["blocks"] is None


# ------------------------------------------------------------------- heads of attention layers


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=60, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2, pad_token_id=0
    )
    return transformers.T5EncoderModel(config)


def torch_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(32, 4, 64)


def names(prefix: str, children: str) -> set[str]:
    return {f"{prefix}.{child}.weight" for child in children.split()}


# Rows and columns that are cut with one head to a block, and the size of a head.
HEADS: list[tuple[Callable[[], nn.Module], int, set[str], set[str]]] = [
    (
        whisper,
        16,
        names("model.encoder.layers.0.self_attn", "q_proj k_proj v_proj")
        | names("model.decoder.layers.0.self_attn", "q_proj k_proj v_proj")
        | names("model.decoder.layers.0.encoder_attn", "q_proj k_proj v_proj"),
        names("model.encoder.layers.0.self_attn", "out_proj")
        | names("model.decoder.layers.0.self_attn", "out_proj")
        | names("model.decoder.layers.0.encoder_attn", "out_proj"),
    ),
    (
        wav2vec2,
        16,
        names("wav2vec2.encoder.layers.0.attention", "q_proj k_proj v_proj"),
        names("wav2vec2.encoder.layers.0.attention", "out_proj"),
    ),
    (
        conformer,
        16,
        names("wav2vec2_conformer.encoder.layers.0.self_attn", "linear_q linear_k linear_v"),
        names("wav2vec2_conformer.encoder.layers.0.self_attn", "linear_out"),
    ),
    (  # four heads of queries, two of keys and values
        llama,
        8,
        names("model.layers.0.self_attn", "q_proj k_proj v_proj"),
        names("model.layers.0.self_attn", "o_proj"),
    ),
    (
        bert,
        16,
        names("bert.encoder.layer.0.attention.self", "query key value"),
        names("bert.encoder.layer.0.attention.output", "dense"),
    ),
    (
        t5,
        8,
        names("encoder.block.0.layer.0.SelfAttention", "q k v"),
        names("encoder.block.0.layer.0.SelfAttention", "o"),
    ),
    (  # stored transposed
        gpt2,
        16,
        names("transformer.h.0.attn", "c_proj"),
        names("transformer.h.0.attn", "c_attn"),
    ),
    (torch_layer, 8, {"self_attn.in_proj_weight"}, {"self_attn.out_proj.weight"}),
]


def split_names(optimizer: MaxFactor) -> dict[tuple[str, int], set[str]]:
    return {
        group["blocks"]: set(group["param_names"])
        for group in optimizer.param_groups
        if group["blocks"] is not None
    }


@pytest.mark.parametrize(("make", "size", "rows", "columns"), HEADS)
def test_heads(make: Callable[[], nn.Module], size: int, rows: set[str], columns: set[str]) -> None:
    with torch.device("meta"):
        model = make()
    optimizer = for_model(model, heads_per_block=1)
    assert split_names(optimizer) == {("rows", size): rows, ("columns", size): columns}
    kinds = [group["kind"] for group in optimizer.param_groups if group["blocks"] is not None]
    assert kinds == ["hidden", "hidden"]
    told = [row.direction for row in optimizer.describe()]
    assert told[:3] == ["orthogonal", f"orthogonal {size} columns", f"orthogonal {size} rows"]
    everything = {name for group in optimizer.param_groups for name in group["param_names"]}
    whole = for_model(model).param_groups
    assert everything == {name for group in whole for name in group["param_names"]}
    assert all(group["blocks"] is None for group in whole)


def test_groups_of_heads() -> None:
    """At most as many as asked for, and a number that divides those of each matrix."""
    wide, fused = llama(), torch_layer()
    found = split_names(for_model(wide, heads_per_block=3))
    attention = "model.layers.0.self_attn"
    # Keys and values have two heads: one block, so they stay whole.
    assert found == {
        ("rows", 16): names(attention, "q_proj"),
        ("columns", 16): names(attention, "o_proj"),
    }
    # Queries, keys and values of a fused matrix never share a block.
    assert split_names(for_model(fused, heads_per_block=4)) == {
        ("rows", 32): {"self_attn.in_proj_weight"}
    }


class Odd(nn.Module):
    """Attention whose sizes do not fit its number of heads, next to one that does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.layer(3), self.layer(4)

    def layer(self, heads: int, width: int = 16) -> nn.Module:
        module = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("q_proj", "k_proj", "v_proj")})
        module["o_proj"] = nn.Linear(width, 16)
        module.num_heads = heads  # type: ignore[assignment]
        return module


def test_heads_that_are_not_certain() -> None:
    found = split_names(for_model(Odd(), heads_per_block=2))
    assert found[("rows", 8)] == names("second", "q_proj k_proj v_proj")
    with pytest.raises(ValueError, match=r"heads_per_block=1 needs attention layers .* Linear has"):
        for_model(nn.Linear(4, 4), heads_per_block=1)
    with pytest.raises(ValueError, match="heads_per_block=1 is for an orthogonal direction"):
        for_model(torch_layer(), "fast", heads_per_block=1)
    with pytest.raises(ValueError, match="heads_per_block must be at least 1, got 0"):
        for_model(torch_layer(), heads_per_block=0)
    with pytest.raises(TypeError, match=r"has no setting 'blocks', got .* give heads_per_block"):
        for_model(torch_layer(), blocks=("rows", 8))


def fused_elsewhere(width: int) -> nn.Module:
    """GPT-2's layer, whose fused matrix has another width."""
    model = gpt2()
    attention = model.get_submodule("transformer.h.0.attn")
    attention.c_attn = transformers.pytorch_utils.Conv1D(width, 32)
    return model


def test_an_output_that_does_not_fit_its_heads() -> None:
    """No matrix of such a layer is cut, of whichever library; the layer beside it is."""
    model = Odd()
    model.first = model.layer(4, 24)  # more inputs than the heads have outputs
    assert split_names(for_model(model, heads_per_block=2)) == {
        ("rows", 8): names("second", "q_proj k_proj v_proj"),
        ("columns", 8): names("second", "o_proj"),
    }
    theirs = bert()
    theirs.get_submodule("bert.encoder.layer.0.attention").output = nn.Linear(32, 32)
    found = split_names(for_model(theirs, heads_per_block=1))
    assert not [name for own in found.values() for name in own if "0.attention.output" in name]
    with pytest.raises(ValueError, match="needs attention layers whose heads are known"):
        for_model(fused_elsewhere(80), heads_per_block=1)


def test_adapters_are_not_split() -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(whisper(), config)
    optimizer = for_model(model, heads_per_block=1)
    assert {group["kind"]: group["blocks"] for group in optimizer.param_groups} == {"adapter": None}


def test_layers_that_are_unfrozen_later() -> None:
    """They join the groups of their blocks."""
    model = nn.TransformerEncoder(torch_layer(), 2, enable_nested_tensor=False)
    model.layers[0].requires_grad_(False)
    optimizer = for_model(model, heads_per_block=1)
    groups = len(optimizer.param_groups)
    optimizer.add_module(model.layers[0].requires_grad_(True))
    assert len(optimizer.param_groups) == groups
    assert {blocks: len(found) for blocks, found in split_names(optimizer).items()} == {
        ("rows", 8): 2,
        ("columns", 8): 2,
    }


@pytest.mark.parametrize("fused", [False, True])
def test_training_with_heads(fused: bool) -> None:
    """`for_model` steps all groups; the state and the bytes told beforehand are those of a step."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0)
    optimizer = for_model(model, heads_per_block=1, fused=fused, seed=0)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer.step()
    assert not any(torch.equal(param, before[name]) for name, param in model.named_parameters())
    made = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    assert estimate_memory(model, heads_per_block=1).state == made


def test_released_gradients() -> None:
    """Bit for bit as with a step at the end, though each kind of blocks has windows of its own."""
    models = [nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    usual, released = (for_model(each, heads_per_block=1, seed=0) for each in models)
    with release_gradients(models[1], released):
        for t in range(2):
            x = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(t))
            for model, optimizer in zip(models, (usual, released), strict=True):
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert all(map(torch.equal, *(list(model.parameters()) for model in models)))


def test_step_sizes_in_the_logs_of_a_trainer() -> None:
    """Groups of one kind do not hide each other."""
    optimizer = for_model(torch_layer(), heads_per_block=1)
    state, logs = (
        transformers.TrainerState(global_step=3, log_history=[{"step": 3.0}]),
        {"loss": 1.0},
    )
    MaxFactorCallback().on_log(None, state, None, logs=logs, optimizer=optimizer)  # type: ignore[arg-type]
    names = ["hidden", "hidden_8_columns", "hidden_8_rows", "vector"]
    assert list(logs) == ["loss", *(f"effective_lr/{name}" for name in names)]
    assert list(state.log_history[0]) == ["step", *list(logs)[1:]]


# ---------------------------------------------------------------------------------- memory


def test_blocks_borrow_less() -> None:
    """The squares of a block are small, and X may be iterated in more of them at a time."""
    pytest.importorskip("triton")
    with torch.device("meta"):
        model = nn.TransformerEncoderLayer(1280, 20, 1280)
    whole = estimate_memory(model)
    heads = estimate_memory(model, heads_per_block=1)
    assert (heads.weights, heads.gradients, heads.state) == (
        whole.weights,
        whole.gradients,
        whole.state,
    )
    assert heads.borrowed < whole.borrowed
    with pytest.raises(ValueError, match="heads_per_block is for the recipes of maxfactor"):
        estimate_memory(model, "adamw", heads_per_block=1)

"""`estimate_memory` against real optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from maxfactor import RECIPES, estimate_memory, for_model, release_gradients
from maxfactor.backends import borrowed
from maxfactor.backends.torch.step import DEVICE_BLOCK


class Speech(nn.Module):
    """Convolutions, recurrent layers, a frozen part, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Conv1d(8, 16, 5))
        self.cells = nn.GRU(20, 24, num_layers=2)
        self.frozen = nn.Linear(70, 90).requires_grad_(False)
        self.gate = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(24, 11)


class Text(nn.Module):
    """A tied head, and a layer of many values."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(130, 48)
        self.layer = nn.TransformerEncoderLayer(48, 4, 96)
        self.head = nn.Linear(48, 130, bias=False)
        self.head.weight = self.tokens.weight


def whisper_tiny() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.WhisperConfig(
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
    )
    with torch.device("meta"):  # random weights take seconds
        model: nn.Module = transformers.WhisperForConditionalGeneration(config)
    model.to_empty(device="cpu")
    for param in model.parameters():
        param.data.fill_(0.01)
    return model


def state_bytes(*optimizers: Any) -> int:
    """Take a step; count the bytes of all state tensors, each once."""
    tensors: dict[int, torch.Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param) if param.requires_grad else None
        optimizer.step()
        for state in optimizer.state.values():
            tensors |= {id(each): each for each in state.values() if isinstance(each, torch.Tensor)}
    return sum(each.nbytes for each in tensors.values())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", [Speech, Text])
def test_state_is_exact(make: Callable[[], nn.Module], recipe: Any) -> None:
    model = make()
    assert estimate_memory(model, recipe).state == state_bytes(for_model(model, recipe))


def test_state_of_whisper_tiny_is_exact() -> None:
    model = whisper_tiny()
    real = state_bytes(for_model(model, "fast"))
    assert estimate_memory(model, "fast").state == real
    assert 1.0 < real / sum(p.numel() for p in model.parameters() if p.requires_grad) < 1.1
    # The recipe takes seconds on a CPU; the first step of a checkpoint only makes the state.
    quality = for_model(model, "quality", lr=0.0)
    for param in model.parameters():
        param.grad = torch.zeros_like(param) if param.requires_grad else None
    quality.step()
    made = sum(t.nbytes for state in quality.state.values() for t in state.values())
    assert estimate_memory(model, "quality").state == made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [Speech, Text])
def test_peers_are_exact(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    model = make().to(dtype)
    params = [param for param in model.parameters() if param.requires_grad]
    adamw = state_bytes(torch.optim.AdamW(params))
    assert estimate_memory(model, "adamw").state == adamw
    assert estimate_memory(model, "adafactor").state == state_bytes(torch.optim.Adafactor(params))
    if hasattr(torch.optim, "Muon"):  # torch 2.9
        groups = for_model(model).param_groups
        hidden = {p for group in groups if group["kind"] == "hidden" for p in group["params"]}
        rest = [param for param in params if param not in hidden]
        muon = state_bytes(torch.optim.Muon(list(hidden)), torch.optim.AdamW(rest))
        assert estimate_memory(model, "muon").state == muon


def test_8_bit_moments() -> None:
    """Two bytes and two scales for 256 values; small tensors keep float32."""
    model = nn.Linear(100, 64)
    weights = 2 * (6400 + 4 * 25)
    assert estimate_memory(model, "adamw-8bit").state == weights + 2 * 4 * 64 + 2 * 256 * 4


@pytest.mark.parametrize("recipe", ["quality", "published-1.0", "muon", "adamw-8bit"])
def test_meta_device_and_dtype_make_no_difference(recipe: Any) -> None:
    with torch.device("meta"):
        model = Speech()
    cast = estimate_memory(model, recipe, torch.bfloat16)
    assert cast == estimate_memory(Speech().to(torch.bfloat16), recipe)
    assert estimate_memory(model, recipe) == estimate_memory(Speech(), recipe)
    floats = sum(
        t.numel() for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()
    )
    assert cast.weights == 2 * floats + 8  # a counter of the BatchNorm is int64
    assert cast.gradients == 2 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert cast.total == cast.weights + cast.gradients + cast.state + cast.borrowed


def test_released_gradients_and_borrowed_buffers() -> None:
    """Of 24 layers of 4 M parameters, windows of eight are there at a time."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(24)))
    usual = estimate_memory(model, "quality", torch.bfloat16)
    released = estimate_memory(model, "quality", torch.bfloat16, gradient_release=True)
    layer = 2 * 2048**2
    assert usual.gradients == 24 * layer
    assert released.gradients == 8 * layer
    assert released.state == usual.state
    assert released.weights == usual.weights
    # A batch of matrices, whoever is stepped together, and small buffers of each window's plan.
    assert 8 * layer < usual.borrowed < 350e6
    assert released.borrowed == pytest.approx(usual.borrowed, rel=0.02)


def test_released_gradients_of_a_chain() -> None:
    """The estimate is what is really there: the head and the hidden matrices, window by window."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maxfactor.windows.WINDOW", 2 * 16 * 16)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(7)))
        peak = 0

        def count(_: torch.Tensor) -> None:
            nonlocal peak
            found = [param.grad for param in model.parameters()]
            peak = max(peak, sum(grad.nbytes for grad in found if grad is not None))

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(count)  # runs before the step
        optimizer = for_model(model, "lean")
        with release_gradients(model, optimizer):
            model(torch.randn(2, 16)).sum().backward()
        assert estimate_memory(model, "lean", gradient_release=True).gradients == peak


@pytest.mark.parametrize(("recipe", "buffers"), [("quality", 5), ("fast", 4)])
def test_without_triton_the_torch_backend_is_estimated(
    recipe: Any, buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 buffers of the size of a batch: all matrices of a shape, or blocks of their rows."""
    monkeypatch.setattr(borrowed, "has_triton", lambda: False)
    model = nn.Sequential(*[nn.Linear(60, 50, bias=False) for _ in range(4)])
    assert estimate_memory(model, recipe).borrowed == 4 * buffers * 4 * 60 * 50
    with torch.device("meta"):
        large = nn.Sequential(*[nn.Linear(5000, 5000, bias=False) for _ in range(4)])
    # An orthogonal matrix is never cut into blocks of rows.
    numel = 5000**2 if recipe == "quality" else DEVICE_BLOCK
    assert estimate_memory(large, recipe).borrowed == 4 * buffers * numel


def test_errors() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="unknown recipe 'adam'; known recipes and optimizers: "):
        estimate_memory(model, "adam")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gradient_release is for the recipes of maxfactor"):
        estimate_memory(model, "adamw", gradient_release=True)


@pytest.mark.parametrize(
    ("dtype", "error", "message"),
    [
        ("bfloat16", TypeError, r"a torch\.dtype, got 'bfloat16' \(str\); give .* torch\.bfloat16"),
        (float, TypeError, "got <class 'float'>"),
        (torch.int8, ValueError, r"floating-point numbers, got torch\.int8"),
        (torch.complex64, ValueError, r"floating-point numbers, got torch\.complex64"),
    ],
)
@pytest.mark.parametrize("recipe", ["lean", "adamw"])
def test_dtypes_that_weights_cannot_have(
    recipe: Any, dtype: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        estimate_memory(nn.Linear(2, 2), recipe, dtype)

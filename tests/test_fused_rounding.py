"""The kernels' stochastic rounding at positions that fill more than 32 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from maxfactor.rule import rounding

triton: Any = pytest.importorskip("triton")
tl: Any = pytest.importorskip("triton.language")
kernels: Any = pytest.importorskip("maxfactor.backends.triton.kernels.rounding")
descriptors: Any = pytest.importorskip("maxfactor.backends.triton.kernels.descriptors")

rounded, Noise = kernels.rounded, descriptors.Noise
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, COLS, KEY = 4, 64, 0x9ABCDEF0


@triton.jit(do_not_specialize=["origin"])  # type: ignore[untyped-decorator]
def round_tile(w, out, origin, key, DTYPE: tl.constexpr, M: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    at = rows[:, None] * N + cols[None, :]
    noise = Noise(tl.load(key).to(tl.uint32), origin, N, 0)
    tl.store(out + at, rounded(tl.load(w + at), rows, cols, noise, DTYPE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("origin", [2**32 - 3 * COLS // 2, 2**32 - 2 * COLS, 5 * 2**32 + 7])
def test_positions_beyond_32_bits(origin: int, dtype: torch.dtype) -> None:
    """The high word changes within a row, between rows, or not at all."""
    w = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    out, key = torch.empty_like(w), torch.tensor(KEY, device=DEVICE)
    low = tl.bfloat16 if dtype == torch.bfloat16 else tl.float16
    round_tile[(1,)](w, out, origin, key, DTYPE=low, M=ROWS, N=COLS)
    places = torch.arange(ROWS * COLS, device=DEVICE).view(ROWS, COLS) + origin
    noise = rounding.position_noise(w, KEY, places)
    assert torch.equal(noise, rounding.position_noise(w, KEY, origin))
    as_rule = rounding.rounded_bf16 if dtype == torch.bfloat16 else rounding.rounded_fp16
    assert torch.equal(out, as_rule(w, noise))
    assert not torch.equal(out, as_rule(w, rounding.position_noise(w, KEY, origin & 0xFFFF)))

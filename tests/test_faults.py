"""Gradients that are not finite, thousands of times: what stays is what the other steps left.

Each run has a twin that takes only the good steps. Weights and states must be equal bit for bit.
`make soak` takes more steps, and so does a GPU.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxfactor import MaxFactor, release_gradients
from soak import RULES, amount

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BAD = (math.nan, math.inf, -math.inf)
Shapes = tuple[tuple[int, ...], ...]
SHAPES: Shapes = ((5, 12), (9,))
MANY: Shapes = ((4, 6),)  # of the run with most steps
STEPS = {
    "published": amount(10_000, 100_000),
    "fam": amount(150, 20_000),
    "orthogonal": amount(150, 20_000),
    "adafactor": amount(150, 20_000),
}
STRICT = amount(500, 20_000)  # "raise" has no counter that could drift
LIMIT = 20  # skipped steps in a row that raise


def on_gpu(usual: int, many: int) -> int:
    """The kernels are slow in Triton's interpreter."""
    return many if DEVICE == "cuda" else usual


class Gradients:
    """Good gradients from a small pool, and bad ones."""

    def __init__(self, seed: int, device: str = "cpu", shapes: Shapes = SHAPES) -> None:
        draws = torch.Generator().manual_seed(seed)
        self.pool = [
            [torch.randn(shape, generator=draws).to(device) for shape in shapes] for _ in range(32)
        ]
        self.chosen = random.Random(seed)
        self.bad_pool = [self._spoiled() for _ in range(64)]

    def good(self) -> list[Tensor]:
        return self.chosen.choice(self.pool)

    def bad(self) -> list[Tensor]:
        return self.chosen.choice(self.bad_pool)

    def _spoiled(self) -> list[Tensor]:
        """One to all values of one or more tensors are not finite."""
        grads = [grad.clone() for grad in self.good()]
        for grad in self.chosen.sample(grads, self.chosen.randint(1, len(grads))):
            flat = grad.view(-1)
            for _ in range(self.chosen.choice([1, 2, flat.numel()])):
                flat[self.chosen.randrange(flat.numel())] = self.chosen.choice(BAD)
        return grads

    def drawn(self, steps: int) -> Iterator[tuple[bool, list[Tensor]]]:
        """Storms of up to 19 bad gradients, with good ones in between."""
        in_a_row = 0
        share = 0.5
        for _ in range(steps):
            if self.chosen.random() < 0.01:
                share = self.chosen.choice([0.3, 0.8, 0.97])
            is_bad = self.chosen.random() < share and in_a_row < LIMIT - 1
            in_a_row = in_a_row + 1 if is_bad else 0
            yield is_bad, self.bad() if is_bad else self.good()


class Run:
    """An optimizer and its parameters."""

    def __init__(
        self, name: str, device: str = "cpu", shapes: Shapes = SHAPES, **options: Any
    ) -> None:
        cls, arguments = RULES[name]
        draws = torch.Generator().manual_seed(7)
        weights = [torch.randn(shape, generator=draws) for shape in shapes]
        self.params = [nn.Parameter(weight.to(device)) for weight in weights]
        self.optimizer = cls(self.params, **{**arguments, **options})

    def step(self, grads: Sequence[Tensor]) -> None:
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad
        self.optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for number, param in enumerate(self.params):
            found[f"{number}"] = param.detach()
            found |= {f"{number}.{k}": v for k, v in self.optimizer.state[param].items()}
        return found


def assert_same(one: Run, other: Run) -> None:
    first, second = one.tensors(), other.tensors()
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert bool(value.isfinite().all()), name
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("name", RULES)
def test_bad_gradients_leave_nothing_behind(name: str) -> None:
    """With "skip" and with "raise"; the counter of skipped steps is exact."""
    shapes = MANY if name == "published" else SHAPES
    skip, strict = (Run(name, shapes=shapes, nonfinite=how) for how in ("skip", "raise"))
    twin, ignoring = (Run(name, shapes=shapes, nonfinite=how) for how in ("skip", "ignore"))
    skipped = 0
    for number, (is_bad, grads) in enumerate(Gradients(1, shapes=shapes).drawn(STEPS[name])):
        skip.step(grads)
        if is_bad:
            skipped += 1
            assert number >= STRICT or is_refused(strict, grads)
            continue
        twin.step(grads)
        if number < STRICT:
            strict.step(grads)
            assert_same(strict, twin)
        if number < 150:
            ignoring.step(grads)
            assert_same(ignoring, twin)  # as long as gradients are finite
    assert 0.3 * STEPS[name] < skipped < 0.95 * STEPS[name]
    assert skip.optimizer.skipped == skipped
    assert [run.optimizer.skipped for run in (strict, twin, ignoring)] == [0, 0, 0]
    assert_same(skip, twin)
    assert int(skip.tensors()["0.step"]) == STEPS[name] - skipped


def is_refused(run: Run, grads: Sequence[Tensor]) -> bool:
    try:
        run.step(grads)
    except FloatingPointError as error:
        return "nothing was changed" in str(error)
    return False


@pytest.mark.parametrize("name", ["published", "fam"])
def test_bad_gradients_in_the_kernels(name: str) -> None:
    pytest.importorskip("triton")
    steps = on_gpu(amount(12, 400), STEPS[name])
    skip, twin = Run(name, DEVICE, fused=True), Run(name, DEVICE, fused=True)
    skipped = 0
    for is_bad, grads in Gradients(2, DEVICE).drawn(steps):
        skip.step(grads)
        skipped += is_bad
        if not is_bad:
            twin.step(grads)
    assert skip.optimizer.skipped == skipped > 0
    assert_same(skip, twin)


def test_the_twentieth_bad_gradient_in_a_row_raises_and_is_counted() -> None:
    run, twin, grads = Run("published"), Run("published"), Gradients(3)
    for storm in range(1, 6):
        for _ in range(LIMIT - 1):
            run.step(grads.bad())
        for _ in range(2):  # those after it raise, too, until a good one comes
            with pytest.raises(FloatingPointError, match="steps in a row were skipped"):
                run.step(grads.bad())
        assert run.optimizer.skipped == storm * (LIMIT + 1)
        good = grads.good()
        run.step(good)
        twin.step(good)
    assert_same(run, twin)


def test_released_gradients_skip_window_by_window() -> None:
    """A window of parameters with a bad gradient is skipped, and no other."""
    torch.manual_seed(0)
    model, twin = nn.Linear(6, 5), nn.Linear(6, 5)
    twin.load_state_dict(model.state_dict())
    optimizer = MaxFactor(model.named_parameters())
    other = MaxFactor(twin.named_parameters())
    handle = release_gradients(model, optimizer)
    chosen, skipped = random.Random(4), 0
    for _ in range(amount(200, 20_000)):
        x, is_bad = torch.randn(4, 6), chosen.random() < 0.4
        if is_bad:
            x[chosen.randrange(4), chosen.randrange(6)] = chosen.choice(BAD)
            skipped += 1
        model(x).square().sum().backward()
        optimizer.step()
        if not is_bad:
            twin(x).square().sum().backward()
            other.step()
            other.zero_grad()
    handle.remove()
    assert optimizer.skipped == skipped
    for param, same in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(param, same)


# ------------------------------------------------------------------------------- GradScaler


def scaled(grads: Sequence[Tensor], scale: float) -> tuple[bool, list[Tensor]]:
    """The gradients of a scaled loss in float16, in which large values overflow."""
    found = [(grad * scale).to(torch.float16) for grad in grads]
    return any(bool(grad.isinf().any()) for grad in found), [grad.float() for grad in found]


def storm(name: str, device: str, steps: int, **options: Any) -> tuple[int, int]:
    """Overflow upon overflow: equal to a run without GradScaler that lacks those steps."""
    run, twin = Run(name, device, **options), Run(name, device, **options)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**20, growth_interval=2)
    chosen, grads = random.Random(5), Gradients(5, device)
    scale, good_in_a_row, overflows = 2.0**20, 0, 0
    for _ in range(steps):
        size = 2.0 ** chosen.randrange(-3, 8)
        # As float16 has them, so that a power of two changes no digit.
        now = [(size * grad.half()).float() for grad in grads.good()]
        is_bad, given = scaled(now, scale)
        if chosen.random() < 0.05:
            is_bad, given = True, grads.bad()
        for param, grad in zip(run.params, given, strict=True):
            param.grad = grad
        scaler.scale(torch.zeros((), device=device))  # initializes it
        if chosen.random() < 0.5:
            scaler.unscale_(run.optimizer)
        scaler.step(run.optimizer)
        scaler.update()
        if is_bad:
            overflows, good_in_a_row, scale = overflows + 1, 0, scale / 2
        else:
            twin.step(now)
            good_in_a_row += 1
            if good_in_a_row == 2:
                good_in_a_row, scale = 0, scale * 2
        assert scaler.get_scale() == scale
    assert run.optimizer.skipped == 0  # GradScaler has seen them first
    assert_same(run, twin)
    return overflows, steps


@pytest.mark.parametrize("name", ["published", "orthogonal"])
def test_storms_of_overflows_with_grad_scaler(name: str) -> None:
    overflows, steps = storm(name, "cpu", amount(300, 20_000))
    assert 0.2 * steps < overflows < 0.8 * steps


def test_storms_of_overflows_in_the_kernels() -> None:
    """The kernels unscale by themselves, and look at what GradScaler has found."""
    pytest.importorskip("triton")
    overflows, steps = storm("published", DEVICE, on_gpu(amount(12, 200), 2_000), fused=True)
    assert overflows > 0.1 * steps

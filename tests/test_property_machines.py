"""Any sequence of calls, as a training and its user make them: stateful property tests."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor, nn

from maxfactor import RECIPES, MaxFactor, for_model, release_gradients
from maxfactor.optimizer import FactoredOptimizer
from properties import (
    DTYPES,
    LAYOUTS,
    ORDINARY,
    SHAPES,
    Bound,
    Case,
    Counter,
    cases,
    laid_out,
    may_overflow,
    run_settings,
    tensor,
    with_seed,
)
from test_properties import assert_bounded, assert_finite
from trainings import (
    BAD_CALLS,
    COPIES,
    assert_refused,
    assert_same,
    parameters_of,
    saved,
    snapshot,
)

RATES = st.sampled_from([0.0, 1e-4, 0.01, 0.1, 1.0])
NUMBERS = st.integers(0, 2**32)


class Training(RuleBasedStateMachine):
    """Rules that any optimizer has, and what must always hold."""

    counter: Counter  # set by the tests
    optimizer: FactoredOptimizer

    @property
    def params(self) -> list[Tensor]:
        return parameters_of(self.optimizer)

    @rule(every=st.sampled_from([0, 1, 2, None]))
    def record(self, every: int | None) -> None:
        self.optimizer.record_metrics(every)

    @rule(lr=RATES, as_tensor=st.booleans(), which=NUMBERS)
    def change_rate(self, lr: float, as_tensor: bool, which: int) -> None:
        groups = self.optimizer.param_groups
        group = groups[which % len(groups)]
        if group["lr"] is not None:
            group["lr"] = torch.tensor(lr) if as_tensor else lr

    @rule()
    def ask(self) -> None:
        """What a user may look at changes nothing."""
        before = snapshot(self.optimizer)
        repr(self.optimizer)
        self.optimizer.describe()
        assert all(math.isfinite(size) for size in self.optimizer.effective_lr())
        recording = self.optimizer._recording
        if recording is not None and recording.records:
            self.optimizer.metrics().summary()
            str(self.optimizer.report())
        if isinstance(self.optimizer, MaxFactor):
            self.optimizer.spectrum()
        assert_same(before, snapshot(self.optimizer))

    @invariant()
    def everything_is_finite(self) -> None:
        if not hasattr(self, "optimizer"):
            return
        for param in self.params:
            assert bool(param.isfinite().all())
            assert_finite(dict(self.optimizer.state.get(param, {})))


# ------------------------------------------------------------------------------ parameter groups


class Groups(Training):
    """An optimizer of parameters of any shape, dtype and memory format."""

    @initialize(case=cases(weight_powers=ORDINARY, gradient_powers=ORDINARY))
    def build(self, case: Case) -> None:
        type(self).counter.count += 1
        self.case = case
        self.optimizer = case.build([weight.requires_grad_() for weight in case.weights()])
        self.bounds = [Bound(case, param.detach()) for param in self.params]

    @rule(
        number=NUMBERS, kind=st.sampled_from(["normal", "sparse", "zeros"]), power=ORDINARY,
        missing=st.integers(0, 15), layout=st.sampled_from(LAYOUTS),
    )  # fmt: skip
    def step(self, number: int, kind: str, power: int, missing: int, layout: str) -> None:
        """Some parameters may have no gradient: they stay as they are."""
        rng = np.random.default_rng(number)
        for index, param in enumerate(self.params):
            grad = tensor(tuple(param.shape), param.dtype, kind, power, rng)
            param.grad = None if missing >> index & 1 else laid_out(grad, layout)
        self._check_step()

    def _check_step(self) -> bool:
        """Take a step, unless it could overflow; return whether it was taken."""
        optimizer, before, counts = self.optimizer, snapshot(self.optimizer), self._counts()
        rates = [group["lr"] for group in optimizer.param_groups for _ in group["params"]]
        lrs = [None if rate is None else float(rate) for rate in rates]
        expected = []
        for param, bound, lr in zip(self.params, self.bounds, lrs, strict=True):
            bound.t = int(optimizer.state.get(param, {}).get("step", 0))
            expected.append(bound.next(param.detach(), lr))
            if may_overflow(param.detach(), expected[-1]):
                return False
        optimizer.step()
        moved = self._counts() != counts
        for i, param in enumerate(self.params):
            assert_same(param.grad, before["grads"][i])
            if param.grad is None:
                assert torch.equal(param.detach(), before["params"][i])
            else:
                assert_bounded(param.detach(), before["params"][i], expected[i], lrs[i])
                assert self._counts()[i] == counts[i] + int(moved)
        return True

    def _counts(self) -> list[int]:
        return [int(self.optimizer.state.get(p, {}).get("step", 0)) for p in self.params]

    @rule(number=NUMBERS, value=st.sampled_from([math.nan, math.inf, -math.inf]))
    def step_that_is_skipped(self, number: int, value: float) -> None:
        """A gradient that is not finite: nothing moves, and the step is counted as skipped."""
        spoiled = [param for param in self.params if param.numel()]
        if not spoiled:
            return
        for param in self.params:
            param.grad = torch.ones_like(param, requires_grad=False)
        grad = spoiled[number % len(spoiled)].grad
        assert grad is not None
        grad[(0,) * grad.dim()] = value
        if not any(bool(state) for state in self.optimizer.state.values()):
            self.optimizer.state_dict()
        before = snapshot(self.optimizer)
        self.optimizer.step()
        after = snapshot(self.optimizer)
        assert after.pop("skipped") == before.pop("skipped") + 1
        for name in ("params", "grads", "groups"):
            assert_same(before[name], after[name], name)
        for old, new in zip(before["states"], after["states"], strict=True):
            if old:
                assert_same(old, new, "state")
            else:
                assert not new or float(new["step"]) == 0.0
        self._take_a_good_step()

    def _take_a_good_step(self) -> None:
        """So that the guard does not see too many in a row."""
        for param in self.params:
            param.grad = torch.zeros_like(param, requires_grad=False)
        self._check_step()

    @precondition(lambda self: len(self.bounds) < 4)
    @rule(
        shape=SHAPES, dtype=st.sampled_from(DTYPES), layout=st.sampled_from(LAYOUTS),
        number=NUMBERS, decay=st.sampled_from([None, 0.0, 0.2]),
    )  # fmt: skip
    def add_group(
        self, shape: Any, dtype: torch.dtype, layout: str, number: int, decay: float | None
    ) -> None:
        values = tensor(shape, dtype, "normal", 0, np.random.default_rng(number))
        param = laid_out(values, layout).requires_grad_()
        own = {} if decay is None else {"weight_decay": decay}
        defaults = copy.deepcopy(self.optimizer.defaults)
        self.optimizer.add_param_group({"params": [param], **own})
        assert_same(defaults, self.optimizer.defaults)
        case = copy.copy(self.case)
        case.settings = {**case.settings, **own}
        self.bounds.append(Bound(case, param.detach()))

    @rule(way=st.sampled_from(sorted(COPIES)), number=NUMBERS)
    def continue_with_a_copy(self, way: str, number: int) -> None:
        """It takes the same step, bit for bit."""
        twin = COPIES[way](self.optimizer)
        rng = np.random.default_rng(number)
        for mine, theirs in zip(self.params, parameters_of(twin), strict=True):
            mine.grad = tensor(tuple(mine.shape), mine.dtype, "normal", 0, rng)
            theirs.grad = mine.grad.clone()
        if not self._check_step():
            return
        twin.step()
        old, new = snapshot(self.optimizer), snapshot(twin)
        for name in ("params", "states", "groups", "lengths"):
            assert_same(old[name], new[name], f"{way} {name}")
        self.optimizer = twin

    @rule(dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    def cast(self, dtype: torch.dtype) -> None:
        """As `model.to(dtype)` does it: the state stays in float32."""
        for param in self.params:
            param.grad = None
            param.data = param.data.to(dtype)

    @rule(name=st.sampled_from(sorted(BAD_CALLS)))
    def call_badly(self, name: str) -> None:
        twin = COPIES["deepcopy"](self.optimizer)
        assert_refused(twin, BAD_CALLS[name](twin), name)


def test_parameter_groups(record_property: Any) -> None:
    check_machine(Groups, "groups", record_property)


# -------------------------------------------------------------------------------------- a model


class Net(nn.Module):
    """One layer of each kind, and two that may be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.hidden = nn.Linear(6, 6)
        self.late = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.conv(self.tokens(tokens).mT).mT
        x = self.norm(x + self.late(torch.tanh(self.hidden(x))))
        found: Tensor = self.head(x)
        return found


LATE = ("late", "conv", "head")


class Model(Training):
    """`for_model`, with layers that are unfrozen later, and gradients that are released."""

    optimizer: MaxFactor

    @initialize(
        number=NUMBERS, recipe=st.sampled_from(RECIPES),
        frozen=st.lists(st.sampled_from(LATE), unique=True), foreach=st.booleans(),
    )  # fmt: skip
    def build(self, number: int, recipe: Any, frozen: list[str], foreach: bool) -> None:
        type(self).counter.count += 1
        torch.manual_seed(number)
        self.model, self.recipe, self.frozen = Net(), recipe, list(frozen)
        self.added: list[str] = []
        for name in frozen:
            self.model.get_submodule(name).requires_grad_(False)
        self.execution = {"foreach": foreach, "fused": False}
        self.at_first = list(frozen)
        self.optimizer = for_model(self.model, recipe=recipe, seed=0, **self.execution)
        self.release: Any = None

    def backward(self, model: nn.Module, number: int, *, spoiled: bool = False) -> None:
        tokens = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(number))
        loss = model(tokens).float().square().mean()
        (loss * math.nan if spoiled else loss).backward()

    @rule(number=NUMBERS)
    def step(self, number: int) -> None:
        self.backward(self.model, number)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @rule(number=NUMBERS)
    def step_that_is_skipped(self, number: int) -> None:
        skipped = self.optimizer.skipped
        weights = [param.detach().clone() for param in self.params]
        self.backward(self.model, number, spoiled=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert self.optimizer.skipped == skipped + 1
        assert_same(weights, [param.detach() for param in self.params])
        self.step(number)  # so that the guard does not see too many in a row

    @precondition(lambda self: bool(self.frozen))
    @rule()
    def unfreeze(self) -> None:
        name = self.frozen.pop()
        self.optimizer.add_module(self.model.get_submodule(name).requires_grad_(True))
        self.added.append(name)
        trained = {id(param) for param in self.model.parameters() if param.requires_grad}
        assert {id(param) for param in self.params} == trained

    @precondition(lambda self: self.release is None)
    @rule(number=NUMBERS)
    def release_gradients(self, number: int) -> None:
        """A step in backward is that of a model whose gradients are not released."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        self.release = release_gradients(self.model, self.optimizer)
        self.backward(model, number)
        optimizer.step()
        self.step(number)
        pairs = zip(self.model.parameters(), model.parameters(), strict=True)
        for mine, theirs in pairs:
            assert torch.equal(mine, theirs)

    @precondition(lambda self: self.release is not None)
    @rule()
    def keep_gradients(self) -> None:
        self.release.remove()
        self.release = None

    @rule(number=NUMBERS, through_file=st.booleans())
    def resume(self, number: int, through_file: bool) -> None:
        """A new model and optimizer continue bit for bit."""
        model = copy.deepcopy(self.model) if self.release is None else self._clone()
        for name in self.at_first:
            model.get_submodule(name).requires_grad_(False)
        optimizer = for_model(model, recipe=self.recipe, seed=0, **self.execution)
        for name in self.added:
            optimizer.add_module(model.get_submodule(name).requires_grad_(True))
        state = saved(self.optimizer) if through_file else self.optimizer.state_dict()
        optimizer.load_state_dict(state)
        self.backward(model, number)
        optimizer.step()
        self.step(number)
        for mine, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, theirs)

    def _clone(self) -> Net:
        """The weights in a new model, without the hooks of a release."""
        clone = Net().to(next(self.model.parameters()).dtype)
        clone.load_state_dict(self.model.state_dict())
        return clone

    @rule(dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    def cast(self, dtype: torch.dtype) -> None:
        self.model.to(dtype)

    @rule()
    def refuse(self) -> None:
        """A module of another model."""
        optimizer = self.optimizer
        assert_refused(optimizer, lambda: optimizer.add_module(nn.Linear(2, 2)), "add_module")


def test_a_model(record_property: Any) -> None:
    check_machine(Model, "model", record_property)


def check_machine(machine: type[Training], name: str, record: Any) -> None:
    machine.counter = Counter(record)
    with machine.counter.of(name):
        run_state_machine_as_test(with_seed(machine), settings=run_settings(name))

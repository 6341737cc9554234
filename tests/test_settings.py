"""Settings are checked and resolved once, and again only when a group changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from maxfactor import Adafactor, MaxFactor, Switches, recipe
from maxfactor.settings import AdafactorSettings, MaxFactorSettings


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The groups that were checked."""
    seen: list[object] = []
    original = MaxFactorSettings.from_group.__func__  # type: ignore[attr-defined]

    def counted(cls: type[Any], group: dict[str, Any]) -> Any:
        seen.append(group)
        return original(cls, group)

    monkeypatch.setattr(MaxFactorSettings, "from_group", classmethod(counted))
    return seen


def stepped(optimizer: MaxFactor, checks: list[object], count: int = 1) -> int:
    """Take steps; return how many groups were checked meanwhile."""
    checks.clear()
    for _ in range(count):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()
    return len(checks)


def test_a_group_is_checked_again_only_when_it_changed(checks: list[object]) -> None:
    params = [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    optimizer = MaxFactor([{"params": [param]} for param in params])
    assert stepped(optimizer, checks, 3) == 0
    optimizer.param_groups[0]["lr"] = 0.5  # as a scheduler does
    assert stepped(optimizer, checks) == 0
    optimizer.param_groups[1]["weight_decay"] = 0.5
    assert stepped(optimizer, checks, 2) == 1
    optimizer.param_groups[1]["switches"]["min_lr"] = 0.1  # inside of a dict
    assert stepped(optimizer, checks, 2) == 1


def test_a_change_acts_in_the_next_step() -> None:
    params = [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    optimizers = [MaxFactor([param], lr=0.1) for param in params]
    for optimizer, param in zip(optimizers, params, strict=True):
        param.grad = torch.ones(3, 2)
        optimizer.step()
    optimizers[0].param_groups[0]["maximize"] = True
    optimizers[0].step()
    optimizers[1].step()
    assert (params[0] > params[1]).all()


def test_what_the_rules_resolve_to() -> None:
    """Plain fields, the same whatever the settings were called."""
    rules = MaxFactorSettings().rules
    assert rules.matrix.divides_by_max
    assert not rules.matrix.dense
    assert rules.vector.dense
    assert rules.single is None
    orthogonal = MaxFactorSettings(direction="orthogonal", momentum=0.9).rules
    assert orthogonal.matrix.is_orthogonal
    assert orthogonal.vector.moves_by_sign
    old = MaxFactorSettings(**recipe("published-0.3")).rules
    assert old.of((1, 1)).boost == 2.0
    assert old.of((2, 1)).boost is None
    paper = AdafactorSettings().rules
    assert paper.matrix.divides_by_mean
    assert paper.matrix.offset == 1e-30
    assert AdafactorSettings(lr=0.1).rules.matrix.absolute


def test_switches_as_an_object_and_as_a_dict() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2))
    given = Switches(clip_threshold=0.5)
    one, two = MaxFactor([weight], switches=given), MaxFactor([weight])
    two.param_groups[0]["switches"] = {"clip_threshold": 0.5}
    assert one._settings(0).rules == two._settings(0).rules
    assert one.state_dict()["param_groups"][0]["switches"]["clip_threshold"] == 0.5
    assert isinstance(Adafactor([weight])._settings(0), AdafactorSettings)

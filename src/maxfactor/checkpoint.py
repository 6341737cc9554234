"""Checks that a checkpoint belongs to an optimizer and fits, and copies its state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from maxfactor.distributed.placement import local, moved
from maxfactor.state import MOMENTUM_DTYPES, init_state, state_dtypes, state_shapes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from maxfactor.settings import GroupRules, TensorRule
    from maxfactor.state import Shape, State

    Named = Sequence[tuple[str, Tensor]]  # a group's parameters with their names

MARK = "made_by"  # key of every group: which optimizer saved it, and the format of its state
STATE_FORMAT = 1


class SavedState(NamedTuple):
    """A parameter with its state from a checkpoint, and its rule."""

    param: Tensor
    state: dict[str, Any]
    rule: TensorRule


def check_groups(loaded: dict[str, Any], own: Sequence[Named], mark: str) -> None:
    """Refuse a dict that is no checkpoint, is another optimizer's, or has other groups."""
    if not {"param_groups", "state"} <= set(loaded):
        raise ValueError(
            f"a checkpoint of an optimizer has 'state' and 'param_groups', this one has "
            f"{sorted(map(str, loaded))[:5]}; give what optimizer.state_dict() returned"
        )
    saved_groups = loaded["param_groups"]
    for index, saved in enumerate(saved_groups):
        _check_mark(index, saved, mark)
    if len(saved_groups) != len(own):
        raise ValueError(
            f"the checkpoint has {len(saved_groups)} parameter groups, this optimizer has "
            f"{len(own)}; build it with the same groups before loading"
        )
    first = 0
    for index, (saved, named) in enumerate(zip(saved_groups, own, strict=True)):
        _check_length(index, saved, named, first)
        first += len(named)


def _check_mark(index: int, saved: dict[str, Any], mark: str) -> None:
    """Refuse a group of another optimizer, or of another state format."""
    found, made_by = saved.get(MARK), mark.split("/")[0]
    if found == mark:
        return
    if str(found).split("/")[0] == made_by:
        raise ValueError(
            f"the checkpoint's group {index} is marked {found!r}, and this version of maxfactor "
            f"reads {mark!r}; load it with the version that saved it"
        )
    whose = "another optimizer" if found is None else repr(found)
    raise ValueError(
        f"the checkpoint's group {index} was saved by {whose}, not by {made_by}; load it into the "
        "optimizer that saved it"
    )


def _check_length(index: int, saved: dict[str, Any], own: Named, first: int) -> None:
    count = len(saved["params"])
    if count == len(own):
        return
    names = list(names_of(saved, first)) if count > len(own) else [name for name, _ in own]
    whose = "the checkpoint" if count > len(own) else "this optimizer"
    raise ValueError(
        f"the checkpoint has {count} parameters in group {index}, this optimizer has "
        f"{len(own)}; {names[min(count, len(own))]!r} is only in {whose}"
    )


def check_states(
    loaded: dict[str, Any], own: Sequence[Named], rules: Sequence[GroupRules]
) -> list[SavedState]:
    """Return each parameter with its saved state; refuse a state that does not fit."""
    states = []
    for saved, named, group in zip(loaded["param_groups"], own, rules, strict=True):
        for key, (name, param) in zip(saved["params"], named, strict=True):
            if state := loaded["state"].get(key):
                rule = group.of(tuple(param.shape))
                check_loaded(name, param, state, rule)
                states.append(SavedState(param, state, rule))
    return states


def names_of(group: dict[str, Any], first: int) -> Iterable[str]:
    """Names of a group's parameters; unnamed ones are numbered from `first`."""
    numbered = [f"param_{first + i}" for i in range(len(group["params"]))]
    names: Iterable[str] = group.get("param_names", numbered)
    return names


def in_order(saved: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Reorder a saved group as `own` if both have the same names; else return it unchanged."""
    names = own.get("param_names", [])
    keys = dict(zip(saved.get("param_names", []), saved["params"], strict=False))
    if len(keys) != len(own["params"]) or set(keys) != set(names):
        return saved
    return {**saved, "params": [keys[name] for name in names], "param_names": list(names)}


def check_loaded(name: str, param: Tensor, loaded: dict[str, Any], rule: TensorRule) -> None:
    """Refuse a saved state with other keys, shapes or dtypes than the parameter needs."""
    expected = state_shapes(tuple(param.shape), rule)
    if set(loaded) != set(expected):
        raise ValueError(
            f"the checkpoint holds {sorted(loaded)} for parameter {name!r}, but its shape "
            f"{tuple(param.shape)} needs {sorted(expected)}; it was saved from another model "
            "or another optimizer"
        )
    dtypes = state_dtypes(tuple(param.shape), rule)
    for key, shape in expected.items():
        found = tuple(loaded[key].shape) if isinstance(loaded[key], Tensor) else loaded[key]
        if found != shape:
            raise ValueError(
                f"the checkpoint's {key} of parameter {name!r} has shape {found}, but the "
                f"parameter's shape {tuple(param.shape)} needs {shape}; load it into the model "
                "it was saved from"
            )
        if (loaded[key].dtype == torch.int8) != (dtypes[key] == torch.int8):
            raise ValueError(
                f"the checkpoint's {key} of parameter {name!r} is {loaded[key].dtype}, but its "
                f"settings need {dtypes[key]}; int8 codes cannot be cast; load it as saved"
            )


def check_unchanged(name: str, param: Tensor, state: State, rule: TensorRule) -> None:
    """Refuse settings that no longer fit the state of earlier steps."""
    momentum = state.get("momentum")
    found = None if momentum is None else momentum.dtype
    fits = found == (MOMENTUM_DTYPES[rule.momentum_dtype] if rule.has_momentum else None)
    if not fits or shapes_of(state) != state_shapes(tuple(param.shape), rule):
        raise ValueError(
            f"a setting of parameter {name!r} was changed after its first step (momentum, "
            "momentum_dtype, scale, or the switches factor, full_matrix, scalar_boost), and its "
            f"state {sorted(state)} no longer fits; set it before the first step, or build a new "
            "optimizer"
        )


def shapes_of(state: State) -> dict[str, Shape]:
    """The global shape of each tensor."""
    return {key: tuple(value.shape) for key, value in state.items()}


def restored(
    param: Tensor, loaded: State, rule: TensorRule, *, step_on_device: bool = False
) -> State:
    """Copy a checked state for `param`, each tensor in its own dtype; torch would cast it.

    For a sharded parameter, a whole state is sharded and a sharded one is redistributed.
    """
    state = init_state(param, rule, step_on_device=step_on_device)
    for key, own in state.items():
        local(own).copy_(local(moved(loaded[key].detach(), own)))
    return state

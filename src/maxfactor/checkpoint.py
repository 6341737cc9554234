"""Checks that a checkpoint belongs to an optimizer and fits, and copies its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from maxfactor.distributed.placement import local, moved
from maxfactor.state import (
    MOMENTUM_DTYPES,
    bounds_of,
    init_state,
    state_dtypes,
    state_shapes,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from maxfactor.settings import GroupRules, TensorRule
    from maxfactor.state import Bounds, Shape, State

    Named = Sequence[tuple[str, Tensor]]  # a group's parameters with their names

MARK = "made_by"  # key of every group: which optimizer saved it, and the format of its state
STATE_FORMAT = 1
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # cast to each other


class SavedState(NamedTuple):
    """A parameter with its name, its state from a checkpoint, and its rule."""

    name: str
    param: Tensor
    state: Mapping[str, Any]
    rule: TensorRule


def check_groups(loaded: dict[str, Any], own: Sequence[Named], mark: str) -> None:
    """Refuse a dict that is no checkpoint, is another optimizer's, or has other groups."""
    check_is_dict(loaded)
    if not {"param_groups", "state"} <= set(loaded):
        raise ValueError(
            f"a checkpoint of an optimizer has 'state' and 'param_groups', this one has "
            f"{sorted(map(str, loaded))[:5]}; give what optimizer.state_dict() returned"
        )
    saved_groups = loaded["param_groups"]
    _check_type("'param_groups'", saved_groups, (list, tuple), "list")
    for index, saved in enumerate(saved_groups):
        _check_type(f"group {index}", saved, Mapping, "dict")
        _check_mark(index, saved, mark)
        _check_keys(index, saved)
    if len(saved_groups) != len(own):
        raise ValueError(
            f"the checkpoint has {len(saved_groups)} parameter groups, this optimizer has "
            f"{len(own)}; build it with the same groups before loading"
        )
    first = 0
    for index, (saved, named) in enumerate(zip(saved_groups, own, strict=True)):
        _check_length(index, saved, named, first)
        first += len(named)
    _check_entries(loaded)


def check_is_dict(loaded: object) -> None:
    """Refuse what is no dict at all."""
    _check_type("content", loaded, dict, "dict")


def _check_type(what: str, value: object, kind: type | tuple[type, ...], name: str) -> None:
    """Refuse a part of a checkpoint that has another type than it must have."""
    if not isinstance(value, kind):
        raise ValueError(
            f"the checkpoint is damaged: its {what} is no {name}, but "
            f"{type(value).__name__}; give what optimizer.state_dict() returned"
        )


def _check_keys(index: int, saved: Mapping[str, Any]) -> None:
    """Refuse a group whose parameters or names are no proper lists."""
    for name in ("params", "param_names"):
        if name == "params" or name in saved:
            what = f"{name!r} of group {index}"
            _check_type(what, saved.get(name), (list, tuple), "list")
            for entry in saved[name]:
                _check_type(f"entry of {what}", entry, (int, str), "number or name")
    names = saved.get("param_names", saved["params"])
    if len(names) != len(saved["params"]):
        raise ValueError(
            f"the checkpoint is damaged: its group {index} has {len(saved['params'])} parameters "
            f"and {len(names)} names; give what optimizer.state_dict() returned"
        )


def _check_entries(loaded: dict[str, Any]) -> None:
    """Refuse states of no parameter, of two parameters, or that are no dicts."""
    _check_type("'state'", loaded["state"], Mapping, "dict")
    keys = [key for saved in loaded["param_groups"] for key in saved["params"]]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(
            f"the checkpoint is damaged: its groups list parameter {twice!r} twice; give what "
            "optimizer.state_dict() returned"
        )
    known = set(keys)
    for key, state in loaded["state"].items():
        if key not in known:
            raise ValueError(
                f"the checkpoint is damaged: it has a state of parameter {key!r}, which is in "
                "none of its groups; give what optimizer.state_dict() returned"
            )
        _check_type(f"state of parameter {key!r}", state, Mapping, "dict")


def _check_mark(index: int, saved: Mapping[str, Any], mark: str) -> None:
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
                states.append(SavedState(name, param, state, rule))
    check_values(states)
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


def check_loaded(name: str, param: Tensor, loaded: Mapping[str, Any], rule: TensorRule) -> None:
    """Refuse a saved state with other keys, shapes or dtypes than the parameter needs."""
    expected = state_shapes(tuple(param.shape), rule)
    if set(loaded) != set(expected):
        raise ValueError(
            f"the checkpoint holds {sorted(map(str, loaded))} for parameter {name!r}, but its "
            f"shape {tuple(param.shape)} needs {sorted(expected)}; it was saved from another "
            "model or another optimizer"
        )
    dtypes = state_dtypes(tuple(param.shape), rule)
    for key, shape in expected.items():
        what = f"{key} of parameter {name!r}"
        _check_type(what, loaded[key], Tensor, "tensor")
        if tuple(loaded[key].shape) != shape:
            raise ValueError(
                f"the checkpoint's {what} has shape {tuple(loaded[key].shape)}, but the "
                f"parameter's shape {tuple(param.shape)} needs {shape}; load it into the model "
                "it was saved from"
            )
        _check_kind(what, loaded[key], dtypes[key])


def _check_kind(what: str, found: Tensor, dtype: torch.dtype) -> None:
    """Refuse a tensor that has no values, or whose dtype has others than `dtype`."""
    if found.is_meta or found.layout != torch.strided:
        kind = "on the meta device" if found.is_meta else f"sparse ({found.layout})"
        raise ValueError(
            f"the checkpoint's {what} is {kind}, but a state needs dense tensors with values; "
            "load the file without map_location='meta'"
        )
    if found.dtype == dtype or (found.dtype in FLOATS and dtype != torch.int8):
        return
    raise ValueError(
        f"the checkpoint's {what} is {found.dtype}, but its settings need {dtype}, which it "
        "cannot be cast to; load it as saved"
    )


def check_values(states: Sequence[SavedState]) -> None:
    """Refuse values that no training can lead to, see `state.bounds_of`.

    Of shards, a rank looks at its own. Waits for a device only once.
    """
    parts = [part for each in states for part in _parts_of(each)]
    for device in {part.values.device for part in parts}:
        here = [part for part in parts if part.values.device == device]
        ends = [torch.stack(torch.aminmax(part.values)).to(torch.float32) for part in here]
        found = torch.stack(ends).tolist()  # a load may wait for the device, once
        for part, (low, high) in zip(here, found, strict=True):
            _check_range(part, low, high)


class Part(NamedTuple):
    """Values of a saved state that have the same bounds."""

    what: str
    values: Tensor
    bounds: Bounds


def _parts_of(saved: SavedState) -> Iterator[Part]:
    """The values of a saved state, without empty tensors."""
    for key, tensor in saved.state.items():
        values, bounds = local(tensor), bounds_of(key, tensor.dtype)
        rows = values.unbind() if len(bounds) > 1 else (values,)
        for row, bound in zip(rows, bounds, strict=True):
            if row.numel():
                yield Part(f"{key} of parameter {saved.name!r}", row, bound)


def _check_range(part: Part, low: float, high: float) -> None:
    """Refuse the smallest or largest value of a tensor; NaN is both."""
    bounds = part.bounds
    is_whole = not bounds.is_whole or (low.is_integer() and high.is_integer())
    if bounds.low <= low and high <= bounds.high and is_whole:
        return
    bad = low if not bounds.low <= low else high
    raise ValueError(
        f"the checkpoint's {part.what} holds {bad:g}, but it can only hold {bounds}; the "
        "checkpoint is damaged, or of a training with nonfinite='ignore': load an earlier one"
    )


def check_unchanged(name: str, param: Tensor, state: State, rule: TensorRule) -> None:
    """Refuse settings that no longer fit the state of earlier steps."""
    device = param.device
    for key, value in state.items():
        if value.device != device and key != "step":
            raise RuntimeError(
                f"parameter {name!r} is on {device}, but its {key} of earlier steps is on "
                f"{value.device}; call optimizer.load_state_dict(optimizer.state_dict()) after "
                "the model was moved"
            )
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
    param: Tensor, loaded: Mapping[str, Tensor], rule: TensorRule, *, step_on_device: bool
) -> State:
    """Copy a checked state for `param`, each tensor in its own dtype; torch would cast it.

    For a sharded parameter, a whole state is sharded and a sharded one is redistributed.
    """
    state = init_state(param, rule, step_on_device=step_on_device)
    for key, own in state.items():
        local(own).copy_(local(moved(loaded[key].detach(), own)))
    return state

"""How a run of a study is described, and the optimizers that a run names."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim import Optimizer

import maxfactor
from measurement import Record, every_kind
from speech_application import make_optimizer

if TYPE_CHECKING:
    from torch import nn

    from maxfactor.recipes import RecipeName

PEERS = ("adamw", "adafactor", "lion", "muon")
# Width, layers (of a Whisper on each side), heads.
SIZES = {
    "small": (192, 3, 6),
    "large": (384, 4, 6),
    "nano": (128, 2, 4),
    "llama": (128, 4, 4),
    "quick": (16, 1, 2),
}


@dataclass(frozen=True)
class Run:
    """Everything that decides what a training computes.

    Args:
        optimizer: A recipe of ours, or "adamw", "adafactor", "lion", "muon".
        lr: The highest learning rate.
        seed: Of the weights and of the order of the data.
        settings: For a recipe: arguments of `for_model`; for Muon: settings of its group.
        by_kind: For a recipe: settings for groups of one kind, or for all but the hidden ones
            under "others"; `lr_share` is a share of the learning rate.
        clip: The norm that gradients are clipped to.
        task: "sentences", "digits" or "language".
        size: A name in SIZES.
        batch: Utterances, or pieces of text, per step.
        steps: Of the optimizer.
        language: What a speech model learns.
        start: "english" for a model that was trained on English before, None for random weights.
        train: Utterances to learn from; the language model reads a whole corpus.
        validation: Utterances, or pieces of text, to measure on.
    """

    optimizer: str
    lr: float
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    by_kind: dict[str, dict[str, Any]] = field(default_factory=dict)
    clip: float | None = None
    task: str = "sentences"
    size: str = "small"
    batch: int = 48
    steps: int = 1500
    language: str = "en"
    start: str | None = None
    train: int = 24_000
    validation: int = 1_000

    @property
    def described(self) -> Record:
        """The fields that differ from their defaults, which is how a run is stored."""
        usual = asdict(Run(self.optimizer, self.lr))
        given = ("optimizer", "lr", "seed")
        return {
            name: value
            for name, value in asdict(self).items()
            if name in given or value != usual[name]
        }

    def __str__(self) -> str:
        shown = {name: value for name, value in self.described.items() if name in EXTRA}
        extra = " " + json.dumps(shown) if shown else ""
        return f"{self.optimizer} lr {self.lr:g} seed {self.seed}{extra}"

    @property
    def key(self) -> str:
        """A digest by which a run is found again, however its settings are written."""
        return _key_of(json.dumps(self.described, sort_keys=True))

    @property
    def measure(self) -> str:
        """What counts: word errors in per cent, or bits per byte."""
        return "bits" if self.task == "language" else "wer"

    @property
    def jobs(self) -> int:
        """How many small runs it counts for, by the memory of its activations."""
        width, layers, _ = SIZES[self.size]
        return max(1, round(self.batch * width * layers / (48 * 192 * 3) / 2))


EXTRA = {one.name for one in fields(Run)} - {"optimizer", "lr", "seed"}


def quick(run: Run) -> Run:
    """The same in about a second on a CPU, to test the program and nothing else."""
    return replace(run, size="quick", batch=4, steps=6, train=24, validation=6)


@functools.cache
def _key_of(described: str) -> str:
    run = Run(**json.loads(described))
    if run.optimizer in PEERS:
        return key_of(run.described)
    return key_of(run.described, group_settings(run))


def key_of(described: Record, groups: Record | None = None) -> str:
    """The key of a stored run: for a recipe by the settings that its groups really had.

    So a run that two tables share is done once, and a recipe that was changed is run again.
    """
    decisive = dict(described)
    if groups is not None:
        for name in ("optimizer", "settings", "by_kind", "lr"):  # the groups have them
            decisive.pop(name, None)
        decisive["groups"] = strict(groups)
    text = json.dumps(decisive, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


# The settings that decide what a recipe computes, with the values that are not written down.
UNWRITTEN: Record = {
    "weight_decay": 0.01,
    "decay_by": "lr",
    "momentum": None,
    "nesterov": False,
    "momentum_dtype": None,
    "direction": "sign_max",
    "d": 1.0,
    "scale": "current",
    "eps": (1e-10, 1e-3),
}


def group_settings(run: Run) -> dict[str, Record]:
    """The settings of a recipe by kind of layer, which seed, task and sizes do not change."""
    decisive = Run(run.optimizer, lr=run.lr, settings=run.settings, by_kind=run.by_kind)
    groups = _groups_of(json.dumps(decisive.described, sort_keys=True))
    return {kind: dict(settings) for kind, settings in groups.items()}


@functools.cache
def _groups_of(described: str) -> dict[str, Record]:
    optimizer = recipe_optimizer(Run(**json.loads(described)), _meta_model(), on_cuda=False)
    return {group["kind"]: _written(group) for group in optimizer.param_groups}


@functools.cache
def _meta_model() -> nn.Module:
    return every_kind().to("meta")


def _written(group: Record) -> Record:
    switches = maxfactor.Switches(**(group["switches"] or {}))
    known = {**group, "decay_by": switches.decay_by}
    values = {name: _plain(known[name]) for name in UNWRITTEN}
    written = {name: value for name, value in values.items() if value != UNWRITTEN[name]}
    return {"lr": group["lr"], **written}


def _plain(value: Any) -> Any:
    is_instance = is_dataclass(value) and not isinstance(value, type)
    return asdict(value) if is_instance else value


def strict(value: Any) -> Any:
    """The same with infinity as a word, since JSON has none."""
    if isinstance(value, dict):
        return {key: strict(inner) for key, inner in value.items()}
    return str(value) if isinstance(value, float) and math.isinf(value) else value


# ------------------------------------------------------------------------------ optimizers


def make_optimizers(
    run: Run, model: nn.Module, device: torch.device
) -> tuple[list[Optimizer], bool]:
    """The optimizers of a run, and whether a CUDA graph may hold their step."""
    on_cuda = device.type == "cuda"
    if run.optimizer == "lion":
        return [Lion(_by_decay(model, 0.1), run.lr)], True
    if run.optimizer in PEERS:
        optimizers = make_optimizer(model, run.optimizer, run.lr, capturable=on_cuda)
        optimizers[0].param_groups[0].update(run.settings)
        return optimizers, run.optimizer == "adamw"  # the others read numbers on the host
    return [recipe_optimizer(run, model, on_cuda)], has_momentum(run)


def recipe_optimizer(run: Run, model: nn.Module, on_cuda: bool) -> maxfactor.MaxFactor:
    """MaxFactor by recipe, with the run's settings in place of the recipe's."""
    settings = {**run.settings, "nonfinite": "ignore"}  # a check would wait for the device
    if on_cuda:
        settings["capturable"] = has_momentum(run)
    recipe = cast("RecipeName", run.optimizer)
    optimizer = maxfactor.for_model(model, recipe, run.lr, **settings)
    for group in optimizer.param_groups:
        others = {} if group["kind"] == "hidden" else run.by_kind.get("others", {})
        changes = {**others, **run.by_kind.get(group["kind"], {})}
        if (share := changes.pop("lr_share", None)) is not None:
            group["lr"] = run.lr * share
        group.update(changes)
    return optimizer


def has_momentum(run: Run) -> bool:
    """Whether there is momentum; without it, counters on the device make lists of one tensor."""
    if "momentum" in run.settings:
        return run.settings["momentum"] is not None
    return run.optimizer in ("fast", "quality")


def _by_decay(model: nn.Module, decay: float) -> list[Record]:
    """Two groups: matrices with decay, norms and biases without."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [one for one in params if one.ndim >= 2], "weight_decay": decay},
        {"params": [one for one in params if one.ndim < 2], "weight_decay": 0.0},
    ]


class Lion(Optimizer):
    """Lion: the sign of an interpolation between momentum and gradient.

    Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.98)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Take one step; `lr` may be a tensor."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            grads = [param.grad for param in params]
            for param in params:
                self.state[param].setdefault("momentum", torch.zeros_like(param))
            momenta = [self.state[param]["momentum"] for param in params]
            lr, (beta1, beta2) = group["lr"], group["betas"]
            moves = torch._foreach_sign(torch._foreach_lerp(momenta, grads, 1 - beta1))
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            torch._foreach_add_(params, torch._foreach_mul(moves, -lr))
            torch._foreach_lerp_(momenta, grads, 1 - beta2)


def rate_factor(run: Run, step: int) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine to zero.

    Digits reach the full rate one step later, as in `maxfactor train`.
    """
    warmup = max(1, round(WARMUP_SHARE * run.steps))
    if step < warmup:
        return (step + 1) / (warmup + (run.task == "digits"))
    return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, run.steps - warmup))


WARMUP_SHARE = 0.1

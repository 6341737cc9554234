"""The optimizers of a trial: recipes of ours, and peers with their usual settings.

Peers come from torch, or from the package pytorch_optimizer. All have gradients clipped to norm 1,
and decay for matrices alone.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

import maxfactor
from maxfactor.rule import newton_schulz

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from studies.suite.trials import Trial

CLIP = 1.0
MATRICES = ("hidden", "adapter")  # what Muon takes; other parameters are AdamW's

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Peer:
    """A peer and what is tried.

    Args:
        make: Makes the optimizers from a model, a rate and a share of it.
        rates: Learning rates by family; others have "speech"'s.
        shares: AdamW's parts of the rate, the first at all rates, the others at the best.
    """

    make: Callable[[nn.Module, float, float], list[Optimizer]]
    rates: Mapping[str, tuple[float, ...]]
    shares: tuple[float, ...] = (0.0,)

    def rates_for(self, family: str) -> tuple[float, ...]:
        """The rates that are tried first in a family."""
        return self.rates.get(family, self.rates["speech"])


def by_kind(model: nn.Module) -> dict[str, list[Tensor]]:
    """Trainable parameters by the kinds of `for_model`."""
    groups = maxfactor.for_model(model, "lean").param_groups
    return {group["kind"]: list(group["params"]) for group in groups}


def by_decay(model: nn.Module, decay: float) -> Groups:
    """The trainable parameters in two groups: matrices with decay, norms and biases without."""
    return decay_groups([param for own in by_kind(model).values() for param in own], decay)


def decay_groups(params: list[Tensor], decay: float) -> Groups:
    """Matrices with decay, norms and biases without; no empty group."""
    groups = [
        {"params": [one for one in params if one.ndim >= 2], "weight_decay": decay},
        {"params": [one for one in params if one.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(beta2: float) -> Callable[[nn.Module, float, float], list[Optimizer]]:
    """AdamW, fused on a GPU."""

    def make(model: nn.Module, lr: float, share: float) -> list[Optimizer]:  # noqa: ARG001
        return [torch.optim.AdamW(by_decay(model, 0.1), lr, (0.9, beta2), fused=True)]

    return make


def with_adamw(
    matrices: Callable[[list[Tensor], float], Optimizer],
) -> Callable[[nn.Module, float, float], list[Optimizer]]:
    """An optimizer of hidden matrices, and AdamW for the rest with a share of the rate."""

    def make(model: nn.Module, lr: float, share: float) -> list[Optimizer]:
        kinds = by_kind(model)
        hidden = [param for kind in MATRICES for param in kinds.get(kind, []) if param.ndim == 2]
        taken = set(hidden)
        rest = [param for own in kinds.values() for param in own if param not in taken]
        made = [matrices(hidden, lr)] if hidden else []
        if groups := decay_groups(rest, 0.1):
            made.append(torch.optim.AdamW(groups, lr * share, (0.9, 0.95), fused=True))
        return made

    return make


def muon(adjust: str) -> Callable[[list[Tensor], float], Optimizer]:
    """Muon of torch."""
    return lambda params, lr: torch.optim.Muon(
        params, lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn=adjust
    )


def packaged(name: str, decay: float, **settings: Any) -> Callable[..., list[Optimizer]]:
    """An optimizer of pytorch_optimizer for all parameters."""

    def make(model: nn.Module, lr: float, share: float) -> list[Optimizer]:  # noqa: ARG001
        return [_packaged(name)(by_decay(model, decay), lr=lr, **settings)]

    return make


def normuon(params: list[Tensor], lr: float) -> Optimizer:
    """NorMuon of pytorch_optimizer for hidden matrices."""
    group = {"params": params, "use_muon": True}
    made: Optimizer = _packaged("NorMuon")(
        [group], lr=lr, weight_decay=0.1, momentum=0.95, beta2=0.95
    )
    return made


def _packaged(name: str) -> Any:
    import pytorch_optimizer

    return getattr(pytorch_optimizer, name)


def adafactor(model: nn.Module, lr: float, share: float) -> list[Optimizer]:  # noqa: ARG001
    """Adafactor of torch."""
    return [torch.optim.Adafactor(by_decay(model, 0.0), lr=lr)]


def nadamw(model: nn.Module, lr: float, share: float) -> list[Optimizer]:  # noqa: ARG001
    """NAdam of torch with decoupled decay."""
    groups = by_decay(model, 0.1)
    return [torch.optim.NAdam(groups, lr, (0.9, 0.98), decoupled_weight_decay=True)]


ADAM_RATES = {
    "speech": (0.0005, 0.001, 0.002, 0.004),
    "fine-tuning": (0.00025, 0.0005, 0.001, 0.002),
    "lora": (0.001, 0.002, 0.004, 0.008, 0.016),
}
MUON_RATES = {"speech": (0.01, 0.02, 0.04, 0.08), "fine-tuning": (0.005, 0.01, 0.02, 0.04)}
MATCHED_RATES = {
    "speech": (0.001, 0.002, 0.004, 0.008),
    "fine-tuning": (0.0005, 0.001, 0.002, 0.004),
    "lora": (0.002, 0.004, 0.008, 0.016),
}
SOAP_RATES = {
    "speech": (0.0015, 0.003, 0.006, 0.012),
    "fine-tuning": (0.0005, 0.001, 0.002, 0.004),
    "lora": (0.001, 0.002, 0.004, 0.008, 0.016),
}
ADAFACTOR_RATES = {"speech": (0.01, 0.02, 0.04, 0.08)}

PEERS: dict[str, Peer] = {
    "adamw-95": Peer(adamw(0.95), ADAM_RATES),
    "adamw-98": Peer(adamw(0.98), ADAM_RATES),
    "muon": Peer(with_adamw(muon("original")), MUON_RATES, (0.1, 0.05, 0.2)),
    "muon-matched": Peer(with_adamw(muon("match_rms_adamw")), MATCHED_RATES, (1.0, 0.5)),
    "normuon": Peer(with_adamw(normuon), MUON_RATES, (0.1, 0.05, 0.2)),
    "soap": Peer(packaged("SOAP", 0.01, betas=(0.95, 0.95)), SOAP_RATES),
    "adafactor": Peer(adafactor, ADAFACTOR_RATES),
}
MORE_PEERS: dict[str, Peer] = {
    "nadamw": Peer(nadamw, ADAM_RATES),
    "ademamix": Peer(
        packaged("AdEMAMix", 0.1, betas=(0.9, 0.98, 0.999), weight_decouple=True), ADAM_RATES
    ),
    "mars": Peer(packaged("MARS", 0.1), SOAP_RATES),
    "lion": Peer(packaged("Lion", 0.1), {"speech": (0.00005, 0.0001, 0.0002, 0.0004)}),
    "came": Peer(packaged("CAME", 0.01), ADAM_RATES),
    "schedule-free": Peer(packaged("ScheduleFreeAdamW", 0.01, betas=(0.9, 0.98)), ADAM_RATES),
}
ALL_PEERS = {**PEERS, **MORE_PEERS}
OURS = ("quality", "fast", "lean")


def make_optimizers(trial: Trial, model: nn.Module) -> list[Optimizer]:
    """The optimizers of a trial."""
    if trial.optimizer in ALL_PEERS:
        return ALL_PEERS[trial.optimizer].make(model, trial.lr, trial.share)
    return [recipe_optimizer(trial, model)]


def recipe_optimizer(trial: Trial, model: nn.Module) -> maxfactor.MaxFactor:
    """A recipe, with the trial's settings in place of its own."""
    recipe: Any = trial.optimizer
    settings = dict(trial.settings)
    if trial.iteration:
        settings["foreach"] = True  # the kernels have an iteration of their own
    optimizer = maxfactor.for_model(model, recipe, trial.lr, **settings)
    if not trial.by_kind:
        return optimizer
    groups = [dict(group) for group in optimizer.param_groups]
    for group in groups:
        changes = dict(trial.by_kind.get(group["kind"], {}))
        share = changes.pop("lr_share", None)
        if share is not None:
            group["lr"] = trial.lr * share
        group.update(changes)
    return maxfactor.MaxFactor(groups)  # anew, as a momentum of another type needs another state


@contextmanager
def iteration_of(trial: Trial) -> Iterator[None]:
    """Orthogonal matrices are iterated as the trial says."""
    with ExitStack() as stack:
        if trial.iteration == "float32":
            stack.enter_context(patch.object(newton_schulz, "newton_schulz", in_float32))
        yield


def in_float32(y: Tensor) -> Tensor:
    """Five plain steps of Newton-Schulz in float32, without TF32."""
    x = newton_schulz.unit_norm(y.float())
    if is_tall := x.shape[-2] > x.shape[-1]:
        x = x.mT
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for a, b, c in newton_schulz.COEFFICIENTS:
            square = x @ x.mT
            x = a * x + (b * square + c * square @ square) @ x
    finally:
        torch.set_float32_matmul_precision(before)
    return x.mT if is_tall else x


def clips(trial: Trial) -> bool:
    """Whether gradients are clipped: those of peers."""
    return trial.optimizer in ALL_PEERS

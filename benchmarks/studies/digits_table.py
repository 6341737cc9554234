"""Another task on a CPU: a Whisper of width 128 learns connected digits in 300 steps of 16.

Every row has three seeds at each of its learning rates. Rows of recipes try on this task what
looked better on sentences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from studies.entries import HALF_QUARTER, QUARTER, Entry, entry, fam, first_fast, first_quality

if TYPE_CHECKING:
    from collections.abc import Mapping

DIGITS: dict[str, Any] = {
    "task": "digits",
    "size": "nano",
    "batch": 16,
    "steps": 300,
    "train": 4_800,
    "validation": 256,
}
RATES: dict[str, tuple[float, ...]] = {
    "quality": (0.01, 0.02, 0.04, 0.08),
    "fast": (0.02, 0.04, 0.08),
    "signs": (0.005, 0.01, 0.02),
    "lean": (0.01, 0.02, 0.028, 0.04),
    "adafactor": (0.01, 0.02, 0.028, 0.04),
    "adamw": (0.0005, 0.001, 0.002, 0.004),
    "muon": (0.005, 0.01, 0.02, 0.04),
}
QUARTER_SAID = "norms and biases at a quarter of the rate"
Rows = dict[str, dict[str, Any]]


def digits_table() -> list[Entry]:
    """Recipes with changes, and peers."""
    alike: dict[str, Any] = {"search": 3, **DIGITS}
    fast = fast_rows()
    signs = ("memory up to 0.92", "memory up to 0.98", *fixed_rows())
    peer: dict[str, Any] = {**alike, "clip": 1.0}
    return [
        *(
            first_quality(f"quality, {name}", RATES["quality"], **alike, **changes)
            for name, changes in quality_rows().items()
        ),
        *(
            first_fast(f"fast, {name}", RATES["fast"], **alike, **changes)
            for name, changes in fast.items()
        ),
        *(
            entry(f"lean, {name}", "lean", RATES["lean"], **alike, **changes)
            for name, changes in lean_rows().items()
        ),
        *(
            first_fast(
                f"fast by signs, {name}",
                RATES["signs"],
                **alike,
                **fast[name],
                direction="sign_max",
                d=1.0,
            )
            for name in signs
        ),
        *(entry(name, name, RATES[name], **peer) for name in ("adafactor", "adamw", "muon")),
        entry("muon, memory of 0.9", "muon", RATES["muon"], **peer, momentum=0.9),
    ]


def quality_rows() -> Rows:
    """Momentum of hidden matrices, and shares of the learning rate."""

    def hidden(momentum: Any, more: Mapping[str, Any] | None = None, **changes: Any) -> Any:
        return {"by_kind": {"hidden": {"momentum": momentum, **changes}, **(more or {})}}

    twice = {"conv": {"lr_share": 2.0}, **HALF_QUARTER}
    return {
        **{f"memory of {beta:g}": hidden(beta) for beta in (0.95, 0.9, 0.85, 0.8)},
        "memory of 0.9, no look-ahead": hidden(0.9, nesterov=False),
        "memory up to 0.92": hidden(fam(beta_max=0.92), nesterov=False),
        "memory of 0.9, current scale": {**hidden(0.9), "scale": "current"},
        f"memory of 0.95, {QUARTER_SAID}": hidden(0.95, QUARTER),
        f"memory of 0.9, {QUARTER_SAID}": hidden(0.9, QUARTER),
        f"memory of 0.9, embeddings at half, {QUARTER_SAID}": hidden(0.9, HALF_QUARTER),
        f"memory of 0.9, convolutions at twice, embeddings at half, {QUARTER_SAID}": hidden(
            0.9, twice
        ),
    }


def fixed_rows() -> Rows:
    """A fixed momentum in FAM's place."""
    return {f"fixed memory of {beta:g}": {"momentum": beta} for beta in (0.8, 0.9, 0.95)}


def fast_rows() -> Rows:
    """FAM's longest memory or a fixed one, and shares of the learning rate."""

    def up_to(beta: float, **shares: float) -> dict[str, Any]:
        by_kind = {kind: {"lr_share": share} for kind, share in shares.items()}
        return {"momentum": fam(beta_max=beta), "by_kind": by_kind}

    return {
        **{f"memory up to {beta:g}": up_to(beta) for beta in (0.98, 0.92, 0.88, 0.84, 0.8)},
        **fixed_rows(),
        **{
            f"fixed memory of {beta:g}, look-ahead": {"momentum": beta, "nesterov": True}
            for beta in (0.8, 0.9)
        },
        "memory up to 0.92, initial scale": {
            "momentum": fam(beta_max=0.92),
            "scale": "initial",
            "by_kind": {"vector": {"scale": "current"}},
        },
        "memory up to 0.92, no weight decay": {**up_to(0.92), "weight_decay": 0.0},
        f"memory up to 0.92, {QUARTER_SAID}": up_to(0.92, vector=0.25),
        "memory up to 0.92, all but hidden at half the rate": up_to(0.92, others=0.5),
        f"memory up to 0.92, convolutions and embeddings at half, {QUARTER_SAID}": up_to(
            0.92, others=0.5, vector=0.25
        ),
        f"memory up to 0.88, {QUARTER_SAID}": up_to(0.88, vector=0.25),
        f"memory up to 0.88, convolutions at twice, embeddings at half, {QUARTER_SAID}": up_to(
            0.88, conv=2.0, embedding=0.5, vector=0.25
        ),
        f"memory up to 0.88, embeddings at half, {QUARTER_SAID}": up_to(
            0.88, embedding=0.5, vector=0.25
        ),
        f"memory up to 0.84, embeddings at half, {QUARTER_SAID}": up_to(
            0.84, embedding=0.5, vector=0.25
        ),
        f"memory up to 0.84, 16 % of the present, embeddings at half, {QUARTER_SAID}": {
            **up_to(0.84, embedding=0.5, vector=0.25),
            "momentum": fam(beta_max=0.84, mix=0.16),
        },
        f"memory up to 0.88, embeddings, {QUARTER_SAID}": up_to(0.88, embedding=0.25, vector=0.25),
        f"memory up to 0.88, convolutions at half, {QUARTER_SAID}": up_to(
            0.88, conv=0.5, vector=0.25
        ),
        "memory up to 0.92, 8 bands of a DCT": {"momentum": fam(beta_max=0.92, bands=8)},
    }


def lean_rows() -> Rows:
    """The clip of the update, and the learning rate of norms and biases."""
    return {
        "clip of the update at 1": {"d": 1.0},
        "clip of the update at 1.5": {"d": 1.5},
        f"clip of the update at 1, {QUARTER_SAID}": {"d": 1.0, "by_kind": QUARTER},
    }

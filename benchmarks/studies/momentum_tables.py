"""The rows of every table of momentum_study.py, most important first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from studies.digits_table import digits_table
from studies.entries import (
    HALF_QUARTER,
    QUARTER,
    Entry,
    entry,
    fam,
    first_fast,
    first_quality,
    with_decay_of_0_2_0,
    with_recipe_decay,
)
from studies.runs import quick

if TYPE_CHECKING:
    from collections.abc import Callable

ADAMW = (5e-4, 1e-3, 2e-3, 4e-3)
OURS = (0.005, 0.01, 0.02, 0.04)
FIXED = (0.95, 0.9, 0.98, 0.8)
NO_CLIP = 1e9  # of the update; JSON has no infinity
LONG = {"hidden": {"momentum": 0.95}}  # the first form of `quality`
# A model that learnt English with AdamW learns German.
GERMAN: dict[str, Any] = {"language": "de", "start": "english", "train": 600, "steps": 500}


def main_table() -> list[Entry]:
    """Peers and recipes."""
    return [
        entry("muon + adamw", "muon", (0.005, 0.01, 0.02, 0.04), search=3, seeds=6),
        entry("quality", "quality", (0.01, 0.02, 0.04, 0.08), search=3, seeds=6),
        entry("adamw, clip 1", "adamw", ADAMW, clip=1.0),
        entry("adafactor (torch)", "adafactor", (0.01, 0.014, 0.02, 0.028, 0.04, 0.08)),
        entry("fast", "fast", (0.01, 0.02, 0.04, 0.08)),
        entry("adamw", "adamw", ADAMW),
        entry("lean", "lean", (0.01, 0.014, 0.02, 0.028, 0.04, 0.08)),
        entry("lion", "lion", (5e-5, 1e-4, 2e-4, 4e-4)),
    ]


def defaults_table() -> list[Entry]:
    """Recipes whose decay changed in 0.2.0, as they were in it: all steps, and half of them."""
    rates = {"quality": 0.02, "fast": 0.04}
    return [
        with_decay_of_0_2_0(entry(f"{name}, {steps} steps", name, (lr,), search=3, steps=steps))
        for steps in (1500, 750)
        for name, lr in rates.items()
    ]


def short_table() -> list[Entry]:
    """Peers and recipes with half the steps, where more words are still wrong."""
    names = ("muon + adamw", "quality", "adamw, clip 1", "fast")
    rates = (0.01, 0.02, 0.04, 0.08)
    rows = [
        *(row for row in main_table() if row.name in names),
        first_fast("fast at first", rates),
        first_quality("quality at first", rates, search=3),
    ]
    return [replace(row, run=replace(row.run, steps=750), seeds=3) for row in rows]


def vectors_table() -> list[Entry]:
    """Layers other than hidden matrices in `quality`; hidden ones have momentum 0.95 here."""
    rates = (0.01, 0.02, 0.04)
    longer = {"momentum": fam()}
    found = [
        first_quality(
            f"others {direction}, {scale} scale, share {share:g}",
            rates,
            d=1.0,
            by_kind={
                "others": {"direction": direction, "scale": scale, "lr_share": share, **longer},
                **LONG,
            },
        )
        for scale in ("current", "initial")
        for direction in ("sign_max", "factored")
        for share in (1.0, 0.5)
    ]
    mixed = first_quality(
        "others sign_max, initial scale, share 1, vectors current",
        rates,
        d=1.0,
        by_kind={
            "others": {"direction": "sign_max", "scale": "initial", "lr_share": 1.0, **longer},
            "vector": {"scale": "current"},
            **LONG,
        },
    )
    own = first_quality("FAM up to 0.92, no clip", rates, search=3, seeds=6, by_kind=LONG)
    before = first_quality(
        "others factored, initial scale, share 1, vectors current",
        rates,
        d=1.0,
        by_kind={"others": longer, **LONG},
    )
    return [own, before, *found, mixed]


def momentum_table() -> list[Entry]:
    """The parts of FAM one by one, with a clip of the update; and no momentum."""
    momentums: dict[str, Any] = {
        **{f"FAM up to {b:g}": fam(beta_max=b) for b in (0.95, 0.98, 0.9)},
        "EMA 0.95": 0.95,
        "EMA 0.95 with FAM's mix": fam(beta_min=0.95, beta_max=0.95, start=0.95),
        "none": None,
    }
    free: dict[str, Any] = {"momentum": fam(beta_max=0.95), "d": NO_CLIP}
    return [
        *(first_fast(name, OURS, momentum=own, d=1.0) for name, own in momentums.items()),
        first_fast("FAM up to 0.95, no clip", OURS, **free),
    ]


BATCHES = (
    (48, 1500, (0.01, 0.02, 0.04)),
    (8, 1500, (0.005, 0.01, 0.02)),
    (192, 600, (0.04, 0.08, 0.16)),
)


def signs_table() -> list[Entry]:
    """FAM and fixed momentum at three batch sizes, with the direction `sign_max`."""
    momentums: dict[str, Any] = {f"FAM up to {b:g}": fam(beta_max=b) for b in (0.95, 0.92, 0.98)}
    momentums |= {f"EMA {beta:g}": beta for beta in FIXED if beta < 0.98}
    return [
        first_fast(
            f"batch {batch}: {name}",
            tuple(rate / 2.0 for rate in rates),
            momentum=momentum,
            direction="sign_max",
            d=1.0,
            batch=batch,
            steps=steps,
        )
        for batch, steps, rates in BATCHES
        for name, momentum in momentums.items()
    ]


def batch_table() -> list[Entry]:
    """FAM and fixed momentum at three batch sizes, in `fast` and in its first form."""
    found = []
    for batch, steps, rates in BATCHES:
        size: dict[str, Any] = {"batch": batch, "steps": steps}
        own = tuple(2.0 * rate for rate in rates)
        found.append(entry(f"batch {batch}: fast", "fast", own, **size))
        found += [
            entry(f"batch {batch}: EMA {beta:g}", "fast", own, momentum=beta, **size)
            for beta in (0.8, 0.9)
        ]
        found.append(first_fast(f"batch {batch}, at first: FAM up to 0.92", own, **size))
        momentums: dict[str, Any] = {f"FAM up to {b:g}": fam(beta_max=b) for b in (0.9, 0.95)}
        momentums |= {f"EMA {beta:g}": beta for beta in FIXED}
        found += [
            first_fast(f"batch {batch}, at first: {name}", rates, momentum=momentum, d=1.0, **size)
            for name, momentum in momentums.items()
        ]
    return found


def range_table() -> list[Entry]:
    """Learning rates up to ten times the usual one."""
    adamw = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 2e-2)
    ours = (0.005, 0.01, 0.02, 0.04, 0.08, 0.2)
    finer = (0.01, 0.0175, 0.02, 0.028, 0.04, 0.07, 0.08, 0.2)
    smaller = "quality, embeddings at half the rate"
    return [
        entry("adamw, clip 1", "adamw", adamw, search=3, clip=1.0),
        entry("quality", "quality", finer, search=6, seeds=6),
        entry("quality, ten times its best rate", "quality", (0.4,)),
        first_quality("quality at first", ours, search=6, seeds=6),
        first_quality("quality at first, EMA 0.95", ours, search=3, by_kind=LONG),
        entry(smaller, "quality", ours[2:5], search=3, by_kind=HALF_QUARTER),
        entry("fast", "fast", (0.01, 0.02, 0.04, 0.08, 0.16)),
    ]


def stores_table() -> list[Entry]:
    """Momentum in float32, int8 and bfloat16, each recipe at its best rate in `main`."""
    longer: dict[str, Any] = {"momentum": fam(beta_max=0.95), "d": 1.0}
    found = []
    for store in ("fp32", "int8", "bf16"):
        name = f"FAM up to 0.95, factored, {store}"
        found += [
            entry(f"quality, {store}", "quality", (0.02,), momentum_dtype=store),
            first_quality(f"quality at first, {store}", (0.02,), momentum_dtype=store),
            first_fast(name, (0.08,), momentum_dtype=store, **longer),
        ]
    return found


def lean_table() -> list[Entry]:
    """Variants of `lean`: learning rate of vectors, clip, scale, weight decay."""
    rates, two = (0.01, 0.02, 0.04), (0.02, 0.04)
    current = {"vector": {"scale": "current"}}
    return [
        entry("as it is", "lean", (0.01, 0.02, 0.04, 0.08)),
        entry("vectors at a quarter of the rate", "lean", rates, by_kind=QUARTER),
        entry(
            "all but hidden at half the rate", "lean", two, by_kind={"others": {"lr_share": 0.5}}
        ),
        entry("no clip of the update", "lean", two, d=NO_CLIP),
        *(entry(f"clip of the update at {d:g}", "lean", two, d=d) for d in (1.5, 2.0, 3.0, 0.5)),
        entry("initial scale, vectors current", "lean", rates, scale="initial", by_kind=current),
        entry("weight decay 0.1", "lean", rates, weight_decay=0.1),
    ]


def quality_table() -> list[Entry]:
    """Alternatives to `quality` with half the steps; hidden matrices have momentum 0.95 here."""
    changes: dict[str, dict[str, Any]] = {
        "FAM up to 0.92, no clip": {},
        "vectors at a quarter of the rate": {"by_kind": QUARTER},
        "weight decay 0.05": {"weight_decay": 0.05},
        "vectors at a quarter of the rate, weight decay 0.05": {
            "by_kind": QUARTER,
            "weight_decay": 0.05,
        },
        "weight decay 0.2": {"weight_decay": 0.2},
        "hidden FAM up to 0.95": {
            "by_kind": {"hidden": {"momentum": fam(beta_max=0.95), "nesterov": False}}
        },
        "hidden EMA 0.9, weight decay 0.05": {
            "by_kind": {"hidden": {"momentum": 0.9}},
            "weight_decay": 0.05,
        },
        "hidden EMA 0.9, embeddings at half, vectors at a quarter of the rate": {
            "by_kind": {"hidden": {"momentum": 0.9}, **HALF_QUARTER}
        },
    }
    return [
        first_quality(
            name,
            (0.02, 0.04),
            search=3,
            steps=750,
            **{**change, "by_kind": {**LONG, **change.get("by_kind", {})}},
        )
        for name, change in changes.items()
    ]


def memory_table() -> list[Entry]:
    """Momentum of hidden matrices in `quality` and in Muon."""
    rates = (0.01, 0.02, 0.04)
    spans: dict[str, tuple[tuple[float, ...], tuple[float, ...], dict[str, Any]]] = {
        "half the steps": ((0.9, 0.85, 0.8, 0.95), rates[1:], {"steps": 750}),
        "all steps": ((0.9, 0.85, 0.95), rates, {}),
        "German": ((0.9, 0.95), rates, GERMAN),
        "Spanish": ((0.9, 0.95), rates, {**GERMAN, "language": "es"}),
    }
    ours = [
        first_quality(
            f"{span}: quality, EMA {beta:g}",
            rates,
            search=3,
            by_kind={"hidden": {"momentum": beta}},
            **settings,
        )
        for span, (betas, rates, settings) in spans.items()
        for beta in betas
    ]
    muon = entry("half the steps: muon, 0.9", "muon", OURS[1:], 3, steps=750, momentum=0.9)
    return [*ours, muon]


def fast_table() -> list[Entry]:
    """Alternatives to `fast`: from scratch, and in fine-tuning on 600 utterances.

    Every row changes the first form of `fast`.
    """
    current = {"vector": {"scale": "current"}}
    longer = fam(beta_max=0.98)
    smaller = {"by_kind": HALF_QUARTER}
    changes: dict[str, dict[str, Any]] = {
        "as it was at first": {},
        "initial scale, vectors current": {"scale": "initial", "by_kind": current},
        "weight decay 0.1": {"weight_decay": 0.1},
        "no weight decay": {"weight_decay": 0.0},
        "vectors at a quarter of the rate": {"by_kind": QUARTER},
        "all but hidden at half the rate": {"by_kind": {"others": {"lr_share": 0.5}}},
        "all but hidden at a quarter of the rate": {"by_kind": {"others": {"lr_share": 0.25}}},
        "all but hidden at half the rate, no weight decay": {
            "by_kind": {"others": {"lr_share": 0.5}},
            "weight_decay": 0.0,
        },
        "initial scale, vectors current, at a quarter of the rate": {
            "scale": "initial",
            "by_kind": {"vector": {"scale": "current", "lr_share": 0.25}},
        },
        "initial scale, vectors current, no weight decay": {
            "scale": "initial",
            "by_kind": current,
            "weight_decay": 0.0,
        },
        "embeddings at half the rate": {"by_kind": {"embedding": {"lr_share": 0.5}}},
        "convolutions at half the rate": {"by_kind": {"conv": {"lr_share": 0.5}}},
        "embeddings and convolutions at half, vectors at a quarter of the rate": {
            "by_kind": {"conv": {"lr_share": 0.5}, **HALF_QUARTER}
        },
        "initial scale, vectors current, all but hidden at half the rate": {
            "scale": "initial",
            "by_kind": {"others": {"lr_share": 0.5}, "vector": {"scale": "current"}},
        },
        **{f"FAM up to {b:g}": {"momentum": fam(beta_max=b)} for b in (0.88, 0.84, 0.95)},
        **{
            f"FAM up to {b:g}, embeddings at half, vectors at a quarter of the rate": {
                "momentum": fam(beta_max=b),
                **smaller,
            }
            for b in (0.88, 0.84)
        },
        "FAM up to 0.88, convolutions at twice, embeddings at half, vectors at a quarter": {
            "momentum": fam(beta_max=0.88),
            "by_kind": {"conv": {"lr_share": 2.0}, **HALF_QUARTER},
        },
        "FAM up to 0.84, embeddings at half, vectors at an eighth of the rate": {
            "momentum": fam(beta_max=0.84),
            "by_kind": {"embedding": {"lr_share": 0.5}, "vector": {"lr_share": 0.125}},
        },
        "FAM up to 0.95, all but hidden at half the rate": {
            "momentum": fam(beta_max=0.95),
            "by_kind": {"others": {"lr_share": 0.5}},
        },
        "mix 0.02, all but hidden at half the rate": {
            "momentum": fam(beta_max=0.92, mix=0.02),
            "by_kind": {"others": {"lr_share": 0.5}},
        },
        "mix 0.2": {"momentum": fam(beta_max=0.92, mix=0.2)},
        "FAM up to 0.84, mix 0.16, embeddings at half, vectors at a quarter of the rate": {
            "momentum": fam(beta_max=0.84, mix=0.16),
            **smaller,
        },
        **{
            f"EMA {beta:g} with nesterov, embeddings at half, vectors at a quarter of the rate": {
                "momentum": beta,
                "nesterov": True,
                **smaller,
            }
            for beta in (0.8, 0.9)
        },
        "clip of the update at 1": {"d": 1.0},
        "sign_max, FAM up to 0.98": {"direction": "sign_max", "momentum": longer, "d": 1.0},
        "sign_max, FAM up to 0.98, initial scale": {
            "direction": "sign_max",
            "momentum": longer,
            "d": 1.0,
            "scale": "initial",
            "by_kind": current,
        },
    }

    def rates_of(name: str) -> tuple[float, ...]:
        if "sign_max" in name:
            return 0.0025, 0.005, 0.01, 0.02
        is_low = "up to 0.84," in name or "nesterov" in name
        return (0.02, 0.04, 0.08) if is_low else (0.04, 0.08, 0.16)

    return [
        first_fast(
            f"{said}: {name}",
            rates_of(name),
            search=3,
            **{**GERMAN, "language": language},
            **change,
        )
        for language, said in (("de", "German"), ("es", "Spanish"))
        for name, change in changes.items()
    ] + [
        first_fast(
            f"English: {name}",
            (0.01, 0.02) if "sign_max" in name else (0.04, 0.08),
            **change,
        )
        for name, change in changes.items()
    ]


def directions_table() -> list[Entry]:
    """Each direction with each momentum and scale, with half the steps.

    The orthogonal direction is for hidden matrices; other layers stay as in `quality`.
    """
    momentums: dict[str, dict[str, Any]] = {
        "EMA 0.9, nesterov": {"momentum": 0.9, "nesterov": True},
        "FAM up to 0.92": {"momentum": fam(beta_max=0.92), "nesterov": False},
        "none": {"momentum": None, "nesterov": False},
    }
    current = {"vector": {"scale": "current"}}
    found = []
    for scale in ("initial", "current"):
        for name, momentum in momentums.items():
            label = f"{name}, {scale} scale"
            common: dict[str, Any] = {"scale": scale, "steps": 750}
            # Without momentum nothing is stored, and nothing bounds the update but its clip.
            is_bare = momentum["momentum"] is None
            hidden = {**momentum, "momentum_dtype": None} if is_bare else momentum
            all_alike: dict[str, Any] = {**common, **momentum, "by_kind": current}
            clip: dict[str, Any] = {"d": 1.0} if is_bare else {}
            found += [
                first_quality(
                    f"orthogonal, {label}",
                    (0.01, 0.02, 0.04),
                    by_kind={"hidden": hidden, **current},
                    **common,
                ),
                first_fast(f"factored, {label}", (0.02, 0.04, 0.08), **all_alike, **clip),
                first_fast(
                    f"sign_max, {label}",
                    (0.005, 0.01, 0.02),
                    direction="sign_max",
                    d=1.0,
                    **all_alike,
                ),
            ]
    return found


def bands_table() -> list[Entry]:
    """One band of FAM or eight."""
    rows = (("1 band", 1), ("8 bands of a DCT", 8))
    return [
        first_fast(name, (0.04, 0.08), momentum=fam(beta_max=0.92, bands=bands))
        for name, bands in rows
    ]


def finetune_table() -> list[Entry]:
    """A model trained on English with AdamW learns another language.

    In 500 steps from few utterances, with three seeds at every rate because the best rates are
    close; in few steps; and from many utterances.
    """
    judged: dict[str, tuple[float, ...]] = {
        "adamw": (1e-4, 3e-4, 1e-3, 2e-3, 4e-3),
        "quality": (0.005, 0.01, 0.02, 0.04, 0.08),
        "fast": (0.01, 0.02, 0.04, 0.08, 0.16),
        "muon": (0.002, 0.005, 0.01, 0.02, 0.04),
    }
    beside: dict[str, tuple[float, ...]] = {
        "lean": (0.005, 0.01, 0.02, 0.04, 0.08),
        "adafactor": (0.005, 0.01, 0.02, 0.04, 0.08),
        "lion": (2e-5, 5e-5, 1e-4, 2e-4, 4e-4),
    }
    tasks: dict[str, dict[str, Any]] = {
        "German, 600 utterances": GERMAN,
        "Spanish, 600 utterances": {**GERMAN, "language": "es"},
        "German, 150 steps": {**GERMAN, "train": 4_000, "steps": 150},
        "Spanish, 150 steps": {**GERMAN, "language": "es", "train": 4_000, "steps": 150},
    }
    found = []
    for task, settings in tasks.items():
        most = 6 if settings["train"] == 600 else 3
        for name, rates in judged.items():
            seeds = 3 if name == "muon" else most
            clip = 1.0 if name == "adamw" else None
            found.append(entry(f"{task}: {name}", name, rates, 3, seeds, clip=clip, **settings))
        before = f"{task}: quality at first"
        found.append(first_quality(before, judged["quality"], 3, seeds=most, **settings))
        if settings["train"] == 600:
            found += [
                entry(f"{task}: {name}", name, own, **settings) for name, own in beside.items()
            ]
    many = {**GERMAN, "train": 12_000}
    found.append(
        entry("German, 12000 utterances: adamw", "adamw", judged["adamw"], clip=1.0, **many)
    )
    return found


def large_table() -> list[Entry]:
    """A larger model: width 384, four layers each, batch 64."""
    large: dict[str, Any] = {"size": "large", "batch": 64, "steps": 1500}
    longer = fam(beta_max=0.95)
    return [
        entry("adamw, clip 1", "adamw", (2.5e-4, 5e-4, 1e-3, 2e-3), clip=1.0, **large),
        entry("fast", "fast", (0.04, 0.08, 0.16), **large),
        first_fast("fast at first", (0.04, 0.08, 0.16), **large),
        first_fast("FAM up to 0.95", (0.02, 0.04, 0.08), momentum=longer, d=1.0, **large),
        entry("quality", "quality", (0.01, 0.02, 0.04), **large),
        first_quality("quality at first", (0.01, 0.02, 0.04), **large),
        entry("adamw", "adamw", (2.5e-4, 5e-4, 1e-3, 2e-3), **large),
        entry("muon + adamw", "muon", (0.0025, 0.005, 0.01, 0.02), **large),
    ]


def language_table() -> list[Entry]:
    """A language model on a CPU: a Llama of width 128 reads Python source, 400 steps of 16.

    No setting of ours was chosen by this task.
    """
    task: dict[str, Any] = {
        "task": "language",
        "size": "llama",
        "batch": 16,
        "steps": 400,
        "validation": 256,
    }
    peer: dict[str, Any] = {**task, "clip": 1.0}
    return [
        entry("quality", "quality", (0.01, 0.02, 0.04, 0.08), **task),
        entry("fast", "fast", (0.02, 0.04, 0.08, 0.16), **task),
        entry("lean", "lean", (0.01, 0.02, 0.04, 0.08), **task),
        entry("adamw", "adamw", (0.001, 0.002, 0.004, 0.008), **peer),
        entry("adafactor", "adafactor", (0.01, 0.02, 0.04, 0.08), **peer),
        entry("muon", "muon", (0.005, 0.01, 0.02, 0.04), **peer),
    ]


TABLES: dict[str, Callable[[], list[Entry]]] = {
    "main": main_table,
    "defaults": defaults_table,
    "short": short_table,
    "vectors": vectors_table,
    "finetune": finetune_table,
    "range": range_table,
    "momentum": momentum_table,
    "batch": batch_table,
    "signs": signs_table,
    "large": large_table,
    "stores": stores_table,
    "lean": lean_table,
    "fast": fast_table,
    "quality": quality_table,
    "memory": memory_table,
    "bands": bands_table,
    "directions": directions_table,
    "digits": digits_table,
    "language": language_table,
}
# A file of benchmarks/results for each group of tables.
FILES: dict[str, tuple[str, ...]] = {
    "momentum_study": tuple(name for name in TABLES if name not in ("digits", "language")),
    "digits_study": ("digits",),
    "language_study": ("language",),
}


def entries_of(table: str, *, is_quick: bool = False, recipe_decay: bool = False) -> list[Entry]:
    """The rows of a table, most important first.

    Args:
        table: A name in TABLES.
        is_quick: Whether runs take about a second each, to test the program.
        recipe_decay: Whether recipes decay as they do now, not as when they were measured.
    """
    rows = TABLES[table]()
    if recipe_decay:
        rows = [with_recipe_decay(row) for row in rows]
    return [replace(row, run=quick(row.run)) for row in rows] if is_quick else rows

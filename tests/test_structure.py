"""The shape of the source: imports point one way, host reads carry their reason."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import maxfactor

SOURCE = Path(maxfactor.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))

# A module may import from the ranks before its own, never from its own or later ones.
RANKS = [
    {"checks", "orthogonal", "placement", "quantize"},
    {"fast"},
    {"hyper"},
    {"guard", "rounding", "state"},
    {"momentum"},
    {"rule", "work"},
    {"backends.choice", "backends.collective", "backends.deal", "backends.tasks"},
    {"backends.kernels.layout", "backends.matrix", "backends.stack"},
    {"backends.kernels.tiles"},
    {"backends.kernels.variance", "backends.kernels.rounding"},
    {"backends.kernels.maxima", "backends.kernels.shards", "backends.kernels.statistics"},
    {"backends.kernels.momentum"},
    {"backends.kernels.weights"},
    {"backends.filtered"},
    {"backends.foreach", "backends.plain", "backends.sharded"},
    {"backends.plan"},
    {"backends.whitening"},
    {"backends.fused"},
    {"backends.fused_sharded"},
    {"description", "recipes", "schedule"},
    {"optimizer"},
    {"adafactor", "bench.shapes", "groups"},
    {"bench.step_time"},
    {"speech.audio", "speech.corpus", "speech.model"},
    {
        "speech.checkpoint",
        "speech.evaluate",
        "speech.features",
        "speech.graphs",
        "speech.optimizers",
        "speech.parallel",
        "speech.processes",
    },
    {"speech.progress", "speech.settings", "speech.shards"},
    {"speech.data", "speech.files", "speech.lock", "speech.metrics", "speech.synth"},
    {"speech.preparation", "speech.transcription"},
    {"speech.trainer"},
    {"speech.train"},
    {"speech.compare"},
    {"report"},
    {"cli"},
    {"__main__"},
]
SPEECH = {
    "espeakng_loader",
    "jiwer",
    "lion_pytorch",
    "numpy",
    "plotly",
    "rich",
    "safetensors",
    "soundfile",
    "tokenizers",
    "transformers",
    "typer",
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def imported(path: Path) -> set[str]:
    """Modules of the package that `path` imports, type-checking blocks included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "maxfactor":
            base = (node.module or "").removeprefix("maxfactor").removeprefix(".")
            for alias in node.names:
                whole = f"{base}.{alias.name}".removeprefix(".")
                is_module = (SOURCE / Path(*whole.split("."))).with_suffix(".py").exists()
                names.add(whole if is_module else base)
    return names


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    name = name_of(path)
    if name.endswith("__init__"):
        return
    rank = next((i for i, names in enumerate(RANKS) if name in names), None)
    assert rank is not None, f"{name} has no rank: add it to RANKS"
    allowed = set().union(*RANKS[:rank])
    assert imported(path) <= allowed, f"{name} imports {imported(path) - allowed}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_host_reads_carry_their_reason(path: Path) -> None:
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        if re.search(r"\.item\(\)|\.tolist\(\)|\.cpu\(\)", line.split("#")[0]):
            reason = "#" in line or lines[number - 1].lstrip().startswith("#")
            reason = reason or "# reading" in lines[number - 1]
            assert reason, f"{name_of(path)}:{number + 1} reads a tensor without saying why"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_torch_is_needed(path: Path) -> None:
    """And Triton, by the fused backend alone; the speech job has an extra of its own."""
    known = {"torch", "maxfactor", *sys.stdlib_module_names}
    if name_of(path) == "backends.plan" or name_of(path).startswith("backends.kernels."):
        known |= {"triton"}
    if name_of(path).startswith("speech.") or name_of(path) in ("cli", "report"):
        known |= SPEECH
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= known
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] in known

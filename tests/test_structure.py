"""The shape of the source. Import contracts between packages are in pyproject.toml."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import maxfactor
import maxfactor_speech

LIBRARY = Path(maxfactor.__file__).parent
APPLICATION = Path(maxfactor_speech.__file__).parent
MODULES = sorted(LIBRARY.rglob("*.py"))
EVERYWHERE = [*MODULES, *sorted(APPLICATION.rglob("*.py"))]
by_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: name_of(path))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(LIBRARY.parent).with_suffix("").parts)


def imported_modules(path: Path) -> set[str]:
    """Every module that a file imports, those for type checking included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


# ------------------------------------------------------------------------------- dependencies


TRAINERS = {
    "maxfactor.integrations.huggingface": {"transformers"},
    "maxfactor.integrations.lightning": {"lightning"},
}


@by_module
def test_only_torch_is_needed(path: Path) -> None:
    """Triton and Numba only where kernels are compiled; the trainer that an integration is for."""
    known = {"torch", "maxfactor", *sys.stdlib_module_names}
    if "maxfactor.backends.triton" in name_of(path):
        known |= {"triton"}
    if "maxfactor.backends.torch.compiled" in name_of(path):
        known |= {"llvmlite", "numba", "numpy"}
    known |= TRAINERS.get(name_of(path), set())
    assert {module.split(".")[0] for module in imported_modules(path)} <= known


INTEGRATIONS = sorted((LIBRARY / "integrations").glob("*.py"))
OUTSIDE = [*sorted(APPLICATION.rglob("*.py")), *INTEGRATIONS]


def test_the_library_does_not_import_integrations() -> None:
    """In a process of its own, as this one may have imported everything."""
    code = "import sys, maxfactor; sys.exit(bool({'lightning', 'transformers'} & {*sys.modules}))"
    path = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, check=True)


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: name_of(path))
def test_applications_and_integrations_use_public_names_alone(path: Path) -> None:
    inside = {m for m in imported_modules(path) if m.startswith("maxfactor.")}
    assert inside <= {"maxfactor.integrations.step_logs"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "maxfactor":
            assert {alias.name for alias in node.names} <= set(maxfactor.__all__)
        is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if is_attribute and node.value.id == "maxfactor":  # type: ignore[attr-defined]
            assert node.attr in maxfactor.__all__  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------- one of each


def test_each_equation_stands_in_three_modules_at_most() -> None:
    """The reference, torch operations, Triton; comments such as `# (5)` tag the equations."""
    modules: dict[str, set[str]] = {}
    for path in MODULES:
        for line in path.read_text().splitlines():
            comment = re.search(r"\S  # ((?:\(\d+'?\) ?)+)(?:$|[,;:])", line)
            for tag in re.findall(r"\d+'?", comment.group(1)) if comment else []:
                modules.setdefault(tag, set()).add(name_of(path))
    assert set(modules) == {"5'", *map(str, range(1, 15))}
    assert {tag: names for tag, names in modules.items() if len(names) > 3} == {}


SETTINGS = r"Settings|MaxFactorSettings|AdafactorSettings|FAM|Switches|TensorRule|GroupRules"


def test_nobody_asks_what_class_the_settings_are() -> None:
    """At most three times, where they are checked."""
    found = [
        f"{name_of(path)}: {line.strip()}"
        for path in MODULES
        for line in path.read_text().splitlines()
        if re.search(rf"isinstance\([^)]*\b({SETTINGS})\b", line)
    ]
    assert len(found) <= 3, found


@by_module
def test_nobody_compares_the_name_of_a_direction(path: Path) -> None:
    if name_of(path) != "maxfactor.settings":
        assert not re.search(r"[!=]= \"(sign_max|factored|orthogonal)\"", path.read_text())


def test_arguments_of_maxfactor() -> None:
    assert len(inspect.signature(maxfactor.MaxFactor).parameters) <= 20


# ----------------------------------------------------------------------------------- security

# What could run code that data brings.
RUNS_DATA = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "subprocess")


def calls(path: Path) -> list[tuple[str, dict[str, str]]]:
    """Every call in a file: what is called, and its named arguments, as they are written."""
    return [
        (
            ast.unparse(node.func),
            {word.arg or "**": ast.unparse(word.value) for word in node.keywords},
        )
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]


@pytest.mark.parametrize("path", EVERYWHERE, ids=lambda path: name_of(path))
def test_data_is_not_run(path: Path) -> None:
    """As SECURITY.md promises, of the library and of the command."""
    imported = {module.split(".")[0] for module in imported_modules(path)}
    if path.name == "sharded_files.py":  # looks at pickles of torch, see test_speech_bad_folders
        imported -= {"pickle"}
    assert imported.isdisjoint(RUNS_DATA)
    for function, named in calls(path):
        assert function not in ("eval", "exec", "os.system", "os.popen")
        if function == "torch.load":
            assert named.get("weights_only") == "True"
        if function.endswith(".from_pretrained"):
            assert named.get("local_files_only") == "True"
            is_auto = re.search(r"\bAuto\w+\.", function) is not None
            assert named.get("trust_remote_code", "False" if not is_auto else "") == "False"


# ------------------------------------------------------------------------------------- habits


@by_module
def test_host_reads_carry_their_reason(path: Path) -> None:
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        if re.search(r"\.item\(\)|\.tolist\(\)|\.cpu\(\)", line.split("#")[0]):
            reason = "#" in line or lines[number - 1].lstrip().startswith("#")
            assert reason, f"{name_of(path)}:{number + 1} reads a tensor without saying why"


PAPERS = {
    "rule/reference.py": "Shazeer and Stern",
    "adafactor.py": "Shazeer and Stern",
    "rule/newton_schulz.py": "Jordan et al.",
    "rule/int8.py": "Dettmers et al.",
    "rule/rounding.py": "Gupta et al.",
    "schedule.py": "Loshchilov and Hutter",
}


@pytest.mark.parametrize("name", PAPERS)
def test_modules_cite_the_papers_they_follow(name: str) -> None:
    text = ast.get_docstring(ast.parse((LIBRARY / name).read_text())) or ""
    assert PAPERS[name] in text.split("References:")[-1]

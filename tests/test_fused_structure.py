"""The shape of the fused backend: few arguments, one set of constants, a `fits` without effects."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import maxfactor
from cases import problem
from maxfactor import MaxFactor

pytest.importorskip("triton")
BACKEND = Path(maxfactor.__file__).parent / "backends" / "triton"
KERNELS = sorted((BACKEND / "kernels").glob("*.py"))


def functions(path: Path) -> list[ast.FunctionDef]:
    found = ast.walk(ast.parse(path.read_text()))
    return [node for node in found if isinstance(node, ast.FunctionDef)]


def is_launched(node: ast.FunctionDef) -> bool:
    """Whether a function is launched by name anywhere in the backend."""
    texts = [path.read_text() for path in BACKEND.glob("*.py")]
    return any(re.search(rf"\b{node.name}\[\(", text) for text in texts)


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_kernels_have_few_arguments(path: Path) -> None:
    """At most 10, of at most 20; each of a kernel's own is explained."""
    for node in functions(path):
        names = [argument.arg for argument in node.args.args]
        assert len(names) <= 10, f"{node.name} has {len(names)} arguments"
        if is_launched(node):
            text = ast.get_docstring(node) or ""
            assert all(f"\n    {name}: " in text for name in names), node.name


def test_equations_stand_in_one_file() -> None:
    """A tag such as `# (5)` marks where an equation is computed."""
    files: dict[str, set[str]] = {}
    for path in BACKEND.rglob("*.py"):
        for line in path.read_text().splitlines():
            for comment in re.findall(r"#.*", line):
                for tag in re.findall(r"\((\d+'?)\)", comment):
                    files.setdefault(tag, set()).add(path.name)
    assert set(files) >= {str(number) for number in range(1, 14)}
    assert {tag for tag, names in files.items() if len(names) > 1} == set()


def test_kernels_have_the_numbers_of_the_host() -> None:
    layout = pytest.importorskip("maxfactor.backends.triton.kernels.layout")
    pairs = [(name, value) for name, value in vars(layout).items() if hasattr(value, "COUNT")]
    assert len(pairs) > 10
    for name, device in pairs:
        host = getattr(layout, "".join(word.capitalize() for word in name.split("_")))
        assert len(host) == device.COUNT
        for member in host:
            assert getattr(device, member.name) == int(member)


def contents(value: Any, depth: int = 3) -> Any:
    """What an object holds: identities of tensors, values of the rest."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, (list, tuple)):
        return [contents(item, depth) for item in value]
    if hasattr(value, "__dict__") and depth:
        return {name: contents(item, depth - 1) for name, item in vars(value).items()}
    return repr(value)


def test_fits_changes_nothing() -> None:
    """Asked twice, with tensors that moved in between, it answers the same and leaves no trace."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    param = torch.nn.Parameter(problem((4, 8)).weight.to(device))
    optimizer = MaxFactor([param], fused=True)
    param.grad = torch.ones_like(param)
    optimizer.step()
    fused = optimizer._fused
    assert fused is not None
    param.grad = torch.ones_like(param)
    before = contents(fused)
    for wanted in (True, True):
        seen = fused.fits([param], optimizer.group_steps(), optimizer.state)
        assert (seen is not None) == wanted
        assert contents(fused) == before
    assert not fused.fits([param, param], optimizer.group_steps(), optimizer.state)
    param.grad = None
    assert not fused.fits([param], optimizer.group_steps(), optimizer.state)
    assert contents(fused) == before

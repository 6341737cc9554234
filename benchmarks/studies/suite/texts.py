"""Texts of the suite: words and source code, each split into training, development and test.

They come from Python's standard library and from the C++ headers of torch, so that nothing has to
be downloaded. A text's own digest decides its split, so no text is in two of them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

Split = Literal["train", "dev", "test"]

TEST_SHARE, DEV_SHARE = 0.05, 0.05
WORD = re.compile(r"[a-z]+")
TESTS = {"site-packages", "test", "tests", "idle_test"}


def split_of(text: str, *, halves: bool = False) -> Split:
    """The split that a text belongs to; with `halves` one half each for development and test."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"suite").digest()
    place = int.from_bytes(digest, "big") / 2**64
    if halves:
        return "dev" if place < 0.5 else "test"
    if place < TEST_SHARE:
        return "test"
    return "dev" if place < TEST_SHARE + DEV_SHARE else "train"


@functools.cache
def words(split: Split) -> list[str]:
    """Words of three to twelve letters from docstrings, each once."""
    found = {word for text in _docstrings() for word in WORD.findall(text.lower())}
    return [word for word in sorted(found) if 3 <= len(word) <= 12 and split_of(word) == split]


@functools.cache
def python_source(split: Split) -> bytes:
    """The source of the standard library, by files."""
    return b"\n".join(path.read_bytes() for path in _python_files() if _of(path, split))


@functools.cache
def docstrings(split: Split) -> bytes:
    """English prose: the docstrings of the standard library, each once."""
    found = dict.fromkeys(text for text in _docstrings() if split_of(text) == split)
    return "\n\n".join(found).encode()


@functools.cache
def cpp_source(split: Split) -> bytes:
    """The C++ headers of torch, by files."""
    root = Path(torch.__file__).parent / "include" / "ATen"
    return b"\n".join(path.read_bytes() for path in sorted(root.rglob("*.h")) if _of(path, split))


def _of(path: Path, split: Split) -> bool:
    return split_of(f"{path.parent.name}/{path.name}") == split


@functools.cache
def _python_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(root.rglob("*.py"))
    return [path for path in paths if not TESTS & set(path.relative_to(root).parts)]


@functools.cache
def _docstrings() -> list[str]:
    return [text for path in _python_files() for text in _docstrings_of(path)]


def _docstrings_of(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # examples of wrong source
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield ast.get_docstring(node) or ""

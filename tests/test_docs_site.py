"""The site that `make docs` builds from docs/: complete, offline, true to the source."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import maxfactor

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


class Page(HTMLParser):
    """The links, the ids and the text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []  # tag, address
        self.ids: set[str] = set()
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append((tag, value))
            if name == "id" and value:
                self.ids.add(value)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    proxies = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https", "all")}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **proxies},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_built(site: Path) -> None:
    assert {path.stem for path in DOCS.glob("*.md")} <= {path.stem for path in site.glob("*.html")}
    assert (site / "search" / "search_index.json").stat().st_size > 100_000


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    for path in site.glob("*.html"):
        loaded = [address for tag, address in Page(path).links if tag != "a"]
        assert [address for address in loaded if "://" in address or address[:2] == "//"] == []
        assert len(loaded) > 3


def test_search_works_in_a_folder(site: Path) -> None:
    """Where browsers start no workers and fetch no files, two scripts of the site replace them."""
    assert (site / "search" / "search_index.js").stat().st_size > 100_000
    assert ("script", "iframe-worker.js") in Page(site / "index.html").links
    assert (site / "iframe-worker.js").is_file()


def test_links_lead_to_files_and_headings_of_the_site(site: Path) -> None:
    pages = {path.name: Page(path) for path in site.glob("*.html") if path.name != "404.html"}
    for name, page in pages.items():
        for _, address in page.links:
            if "://" in address or address.startswith(("mailto:", "data:")):
                continue
            target, _, anchor = address.partition("#")
            assert not target or (site / target).is_file() or target == ".", (name, address)
            if anchor and (not target or target in pages):
                assert anchor in pages[target or name].ids, (name, address)


def test_files_outside_of_docs_are_copied(site: Path) -> None:
    for path in ("README.md", "benchmarks/README.md", "examples/fsdp2.py"):
        assert (site / "files" / f"{path}.txt").read_bytes() == (ROOT / path).read_bytes()
    assert (site / "files/benchmarks/results/momentum_study.json").is_file()


def test_the_reference_has_every_public_name(site: Path) -> None:
    page = Page(site / "reference.html")
    plain = {"RECIPES", "RecipeName", "__version__", "rule"}  # described in words
    named = {f"maxfactor.{name}" for name in set(maxfactor.__all__) - plain}
    named |= {f"maxfactor.integrations.huggingface.{n}" for n in ("ForModel", "MaxFactorCallback")}
    named.add("maxfactor.integrations.lightning.MaxFactorCallback")
    shown = set(re.findall(r"^<!-- ::: (\S+) ", (DOCS / "reference.md").read_text(), re.M))
    assert named <= shown
    assert shown <= page.ids
    assert all(f"maxfactor.{name}" in page.text for name in plain)
    assert ">>> optimizer = maxfactor.for_model(model, lr=0.02)" in page.text
    assert "W <- W - alpha / s * sign(U) * (row maximum of |U|)" in page.text
    assert "code-block" not in page.text


def test_notes_for_the_tests_are_not_shown(site: Path) -> None:
    for path in site.glob("*.html"):
        assert not re.search(r"skip: |```", Page(path).text), path.name
    assert "name|text|normalised text" in Page(site / "command-line.html").text


# ------------------------------------------------------------------------------ error messages


def messages_of_the_source() -> set[str]:
    """All strings of the packages, with `…` in place of values."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    each.value if isinstance(each, ast.Constant) else "…" for each in node.values
                ]
                found.add(re.sub("…+", "…", "".join(map(str, parts))))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def quoted_messages() -> list[str]:
    """What the page quotes: blocks of text, and the first column of tables."""
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```text\n(.*)\n```$", text, re.MULTILINE)
    cells = re.findall(r"^\| (`+)(.*?)\1 \|", text, re.MULTILINE)
    return [*blocks, *(cell for _, cell in cells)]


def test_quoted_messages_are_those_of_the_source() -> None:
    quoted, source = quoted_messages(), messages_of_the_source()
    assert len(quoted) > 30
    assert [each for each in quoted if each not in source] == []

"""What `mkdocs build` does to the pages of docs/, which are written to be read in a clone.

- Links that leave docs/ lead to copies of those files in the site.
- `<!-- ::: maxfactor.MaxFactor step metrics -->` in reference.md becomes the description of that
  name, and of the methods after it.
- Bars in the code of tables lose the backslash that repository hosts need.
- Blocks of code lose the note that they do not run in the tests.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from griffe import Extension
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from griffe import Object
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parent
COPIES = "files"  # the folder of the site with files from outside of docs/
DESCRIBED = re.compile(r"^<!-- ::: (\S+)((?: \w+)*) -->$", re.MULTILINE)
OUTSIDE = re.compile(r"\[([^\[\]]+)\]\(\.\./([^)#\s]+)(?:#[^)\s]*)?\)")


def copy_of(path: str) -> str:
    """Where the site has a file of the repository; browsers show .txt and .json."""
    return f"{COPIES}/{path}" if path.endswith(".json") else f"{COPIES}/{path}.txt"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to outside of docs/."""
    pages = [file.content_string for file in files.documentation_pages()]
    linked = {path for text in pages for _, path in OUTSIDE.findall(text)}
    for path in sorted(linked):
        if (ROOT / path).is_file():
            source = str(ROOT / path)
            files.append(File.generated(config, copy_of(path), abs_src_path=source))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Rewrite what is meant for a clone."""
    markdown = OUTSIDE.sub(_inside, markdown)
    markdown = DESCRIBED.sub(_description, markdown)
    return re.sub(r"^```python skip: .*$", "```python", markdown, flags=re.MULTILINE)


def on_page_content(html: str, **_: Any) -> str:
    """Remove the backslash before a bar in code."""
    return re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace("\\|", "|"), html)


def _inside(link: re.Match[str]) -> str:
    """A link to the copy of a file; the name alone of a folder."""
    text, path = link.groups()
    return f"[{text}]({copy_of(path)})" if (ROOT / path).is_file() else text


def _description(comment: re.Match[str]) -> str:
    """A block of mkdocstrings, with the methods that are named."""
    members = ", ".join(comment[2].split())
    options = f"members: [{members}]\n      inherited_members: [{members}]"
    return f"::: {comment[1]}\n    options:\n      {options}"


class Docstrings(Extension):
    """Reads our docstrings, which are Google's style with `Example:` and blocks of equations."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Give examples and equations the form that the site shows as code."""
        if obj.docstring is not None:
            text = obj.docstring.value.replace(".. code-block:: text\n", "")
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)

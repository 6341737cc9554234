"""What studies of named rows have in common: a command line, and a file that keeps other rows."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxfactor_speech.bench.step_time import circumstances
from touch_tones_study import to_json

if TYPE_CHECKING:
    from collections.abc import Iterable

Record = dict[str, Any]  # a part of a JSON file

RESULTS = Path(__file__).resolve().parent / "results"


def command_line(description: str | None, study: str) -> argparse.ArgumentParser:
    """The options that all have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows, by a regular expression")
    parser.add_argument("--jobs", type=int, default=2, help="trainings side by side")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{study}.json", help="the JSON file")
    parser.add_argument("--quick", action="store_true", help="a smoke test of a few seconds")
    return parser


def chosen(options: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """The rows that are asked for."""
    names = list(names)
    found = [name for name in names if re.search(options.only, name)]
    if not found:
        raise SystemExit(f"no row has {options.only!r}; there are: {'; '.join(names)}")
    return found


def keep(
    options: argparse.Namespace, study: str, order: Iterable[str], new: list[Record], **more: Any
) -> Record:
    """Write rows in their order, with those of the file that were not run again, and return all."""
    known = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    rows = {row["name"]: row for row in (*known, *new)}
    record = {
        "command": f"python benchmarks/{study}.py" + " --quick" * options.quick,
        **circumstances("cpu"),
        **more,
        "rows": [rows[name] for name in order if name in rows],
    }
    options.out.write_text(to_json(record))
    return record

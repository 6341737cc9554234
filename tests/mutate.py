"""Change the maths line by line and see whether a test fails: `make mutants`.

The tests are collected once, and run once to find out which of them pass each line. For each
mutant a forked process puts the changed code into the imported module and runs the tests of its
line, up to the first that fails. `equivalent_mutants.json` lists mutants that were looked at and
compute the same, with the reason. Fails if less than 90 % of the others are killed in any module.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import random
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest

from forks import ended, forked
from mutations import Mutant, mutants_of, unchanged_of

ROOT = Path(__file__).resolve().parent.parent
KNOWN: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_name("equivalent_mutants.json").read_text()
)
LEAST = 0.9
LONG = 0.5  # seconds; such tests come last
OF_MOMENTUM = "momentum momentum_state"
OF_STATE = "checkpoint damaged_checkpoints momentum_state raw_errors bad_input"
TESTS = {
    "rule.reference": "rule oracle momentum adafactor",
    "rule.fam": OF_MOMENTUM,
    "rule.int8": OF_MOMENTUM,
    "rule.momentum": OF_MOMENTUM,
    "rule.newton_schulz": "momentum newton_schulz blocks",
    "rule.rounding": "rounding",
    "rule.squares": "squares extremes rule",
    "schedule": "schedule bad_input raw_errors",
    "checkpoint": OF_STATE,
    "state": f"state rule {OF_STATE} blocks",
}


class Covered(NamedTuple):
    """Of each test, by its place: the lines of modules that it passes, and its seconds."""

    lines: list[set[tuple[str, int]]]
    seconds: list[float]


class Verdict(NamedTuple):
    """What became of a mutant."""

    module: str
    key: str
    outcome: str  # killed, equivalent or survived


class Plugin:
    """Runs the mutants in place of pytest's own loop over the tests."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.failed = False
        self.verdicts: list[Verdict] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out the kernels, which have code of their own."""
        items[:] = [item for item in items if not re.search(r"\bfused\b", item.nodeid)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take note of a failure."""
        self.failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """The hook: first the tests as they are, then all mutants."""
        # They come with the first step of any optimizer, after conftest.py set up Triton.
        import torch._dynamo
        import torch.distributed.tensor  # noqa: F401

        gc.freeze()  # so that a forked process does not copy all objects to look for garbage
        self.items = session.items
        modules = {name: sys.modules[f"maxfactor.{name}"] for name in self.given.modules}
        paths = {str(module.__file__): name for name, module in modules.items()}
        covered = self._baseline(paths)
        for name, module in modules.items():
            self._check_the_check(name, module, covered)
            for mutant in self._sample(name, module):
                self.verdicts.append(self._judge(name, module, mutant, covered))
        return True

    def _check_the_check(self, name: str, module: ModuleType, covered: Covered) -> None:
        """The module as it is, put in place like a mutant, must pass the tests in their order."""
        unchanged = unchanged_of(Path(str(module.__file__)).read_text(), str(module.__file__))
        chosen = self._tests_of(name, unchanged, covered)
        assert not self._is_killed(module, unchanged, chosen, covered), f"{name} as it is fails"

    def _sample(self, name: str, module: ModuleType) -> list[Mutant]:
        path = str(module.__file__)
        found = mutants_of(Path(path).read_text(), path)
        stale = KNOWN.get(name, {}).keys() - {mutant.key for mutant in found}
        assert not stale, f"no mutants of {name}, but listed as equivalent: {sorted(stale)}"
        found = [mutant for mutant in found if self.given.only in mutant.key]
        size = self.given.sample
        if size and size < len(found):
            chosen = random.Random(f"{self.given.seed} {name}").sample(range(len(found)), size)
            found = [found[i] for i in sorted(chosen)]
        return found

    def _baseline(self, paths: dict[str, str]) -> Covered:
        """Run every test with the code as it is, in a process that tells what was passed."""
        told = Path(tempfile.mkdtemp(dir=tempfile.gettempdir())) / "covered"
        failed = told.with_name("failed")
        [code] = ended([forked(lambda: self._record(paths, told), failed)], seconds=3600.0)
        assert code == 0, f"without any change: {failed.read_text()}"
        covered: Covered = pickle.loads(told.read_bytes())
        return covered

    def _record(self, paths: dict[str, str], told: Path) -> None:
        lines: set[tuple[str, int]] = set()

        def of_line(frame: FrameType, event: str, _: object) -> Any:
            lines.add((paths[frame.f_code.co_filename], frame.f_lineno))
            return of_line

        def of_call(frame: FrameType, event: str, _: object) -> Any:
            return of_line if frame.f_code.co_filename in paths else None

        silence()
        covered = Covered([], [])
        for place in range(len(self.items)):
            forget_caches()
            lines.clear()
            began = time.process_time()  # whatever else the machine does
            sys.settrace(of_call)
            self._run(place, place + 1)
            sys.settrace(None)
            covered.seconds.append(time.process_time() - began)
            covered.lines.append(set(lines))
            assert not self.failed, self.items[place].nodeid
        told.write_bytes(pickle.dumps(covered))

    def _run(self, place: int, after: int) -> None:
        item = self.items[place]
        following = self.items[after] if after < len(self.items) else None
        item.ihook.pytest_runtest_protocol(item=item, nextitem=following)

    def _judge(self, name: str, module: ModuleType, mutant: Mutant, covered: Covered) -> Verdict:
        if mutant.key in KNOWN.get(name, {}):
            return Verdict(name, mutant.key, "equivalent")
        chosen = self._tests_of(name, mutant, covered)
        if self._is_killed(module, mutant, chosen, covered):
            return Verdict(name, mutant.key, "killed")
        where = f"{name}:{mutant.lines.start}"
        print(f"survived {len(chosen)} tests: {where} {mutant.key}", flush=True)
        return Verdict(name, mutant.key, "survived")

    def _is_killed(
        self, module: ModuleType, mutant: Mutant, chosen: list[int], covered: Covered
    ) -> bool:
        expected = sum(covered.seconds[place] for place in chosen)
        process = forked(lambda: self._try(module, mutant, chosen), Path(os.devnull))
        try:
            [code] = ended([process], seconds=60.0 + 10.0 * expected)
        except TimeoutError:  # an endless loop
            return True
        return code != 0

    def _tests_of(self, name: str, mutant: Mutant, covered: Covered) -> list[int]:
        """The tests of a mutant's lines, or all; first the fastest of each function."""
        places = [
            place
            for place, lines in enumerate(covered.lines)
            if not mutant.in_function or any((name, line) in lines for line in mutant.lines)
        ]
        rank: Counter[str] = Counter()
        order = []
        for place in sorted(places, key=lambda place: covered.seconds[place]):
            function = self.items[place].nodeid.split("[")[0]
            seconds = covered.seconds[place]
            order.append((seconds > LONG, rank[function], seconds, place))
            rank[function] += 1
        chosen, left = [], self.given.seconds
        for _, _, seconds, place in sorted(order):
            if seconds <= left:
                chosen.append(place)
                left -= seconds
        return chosen

    def _try(self, module: ModuleType, mutant: Mutant, chosen: list[int]) -> None:
        """Run the tests with the changed module; raises if one fails."""
        silence()
        fresh = ModuleType(module.__name__)
        fresh.__file__ = module.__file__
        exec(mutant.code, vars(fresh))
        transplant(module, fresh)
        forget_caches()
        for place, after in zip(chosen, [*chosen[1:], len(self.items)], strict=True):
            self._run(place, after)
            assert not self.failed


def silence() -> None:
    """Drop what this process prints."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def ours() -> Iterator[ModuleType]:
    """The modules of the library and of its tests."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "maxfactor" or name.startswith("test_"):
            yield module


def forget_caches() -> None:
    """Empty every `lru_cache`."""
    for module in ours():
        for value in list(vars(module).values()):
            if callable(getattr(value, "cache_clear", None)):
                value.cache_clear()


def transplant(old: ModuleType | type, fresh: ModuleType | type) -> None:
    """Give functions their new code in place; set other values wherever they were imported."""
    for name, new in list(vars(fresh).items()):
        before = vars(old).get(name)
        before, new = getattr(before, "__wrapped__", before), getattr(new, "__wrapped__", new)
        if new is before or (name.startswith("__") and not isinstance(new, FunctionType)):
            continue
        if isinstance(new, FunctionType) and isinstance(before, FunctionType):
            before.__code__ = new.__code__
            before.__defaults__, before.__kwdefaults__ = new.__defaults__, new.__kwdefaults__
        elif isinstance(new, type) and isinstance(before, type):
            transplant(before, new)
        elif isinstance(old, ModuleType):
            for module in ours():
                if vars(module).get(name) is before:
                    setattr(module, name, new)


def report(verdicts: list[Verdict], given: argparse.Namespace) -> bool:
    """Print the table; whether enough were killed everywhere."""
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for verdict in verdicts:
        table[verdict.module][verdict.outcome] += 1
    print(f"\nseed {given.seed}, sample {given.sample or 'all'}")
    print(f"{'module':20} mutants  killed  equivalent  survived")
    enough = True
    for module, counts in table.items():
        rate = counts["killed"] / max(1, counts["killed"] + counts["survived"])
        enough &= rate >= LEAST
        print(
            f"{module:20} {counts.total():7} {counts['killed']:7} {counts['equivalent']:11} "
            f"{counts['survived']:9}  {rate:6.1%}"
        )
    return enough


def main() -> int:
    """Return 0 if enough mutants are killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=list(TESTS), metavar="MODULE")
    parser.add_argument("--sample", type=int, default=0, help="mutants of a module; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests for a mutant")
    parser.add_argument("--only", default="", help="mutants whose description has this text")
    given = parser.parse_args()
    names = {name for module in given.modules for name in TESTS[module].split()}
    files = [str(ROOT / "tests" / f"test_{name}.py") for name in sorted(names)]
    sources = [str(ROOT / f"src/maxfactor/{name.replace('.', '/')}.py") for name in given.modules]
    quiet = ["-s", "-qq", "--no-header", "--no-summary", "--tb=no", "-p", "no:cacheprovider"]
    plugin = Plugin(given)
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
        code = pytest.main([*quiet, "-m", "not gpu", *files, *sources], plugins=[plugin])
    return int(code) or not report(plugin.verdicts, given)


if __name__ == "__main__":
    sys.exit(main())

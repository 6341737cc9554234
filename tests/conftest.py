"""Without a GPU the kernels run in Triton's interpreter, which must be chosen before it loads.

Tests run side by side, on small tensors: one thread each. Where the packages of the speech job are
missing (`make test-gpu` takes the Python that is there), the files that import them are left out.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forked import context
from interpreter import speed_up_interpreter
from process_state import changes, process_state
from ranks import Ranks

# What is imported stays. To look through it for garbage takes a third of the time of all imports.
gc.disable()

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
speed_up_interpreter()

# Torch looks at it once, at the first product of matrices, and trainings on a GPU insist on it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

torch.set_num_threads(1)

# A script starts its background jobs with SIGINT ignored, and so would be all processes that tests
# start and then interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

MISSING = [name for name in ("jiwer", "soundfile", "typer") if find_spec(name) is None]
# Each starts processes, trains a model to begin with, imports a large package, or computes what is
# expected, once for its tests. Those that share such a start go to one worker, under one name.
ON_ONE_WORKER = {
    "test_backends.py": "backends",
    "test_compiled.py": "compiled",
    "test_collectives.py": "four ranks",
    "test_fused_sharded.py": "four ranks",
    "test_sharded.py": "four ranks",
    "test_sharded_torch.py": "four ranks",
    "test_speech_hybrid.py": "four ranks",
    "test_docs_site.py": "site",
    "test_speech_faults.py": "faults",
    "test_speech_folders.py": "folders",
    "test_speech_parallel.py": "two ranks",
    "test_speech_small_memory.py": "small memory",
    "test_newton_schulz_coefficients.py": "suite",
    "test_suite.py": "suite",
    "test_torch_database.py": "torch database",
    "test_trainers.py": "trainers",
}
# Single tests that share a start with the files above.
WITH_FILES = {"test_the_blocks_for_a_pretrained_whisper": "folders"}
# Single tests that take long begin early, so that no worker waits for the other one at the end.
LONG = (
    "test_the_command_under_torchrun",
    "test_a_stopped_comparison",
    "test_finished_trainings_are_reused",
    "test_a_killed_training",
    "test_study",
    "test_accelerate_fsdp2",
)
NEEDING_SPEECH = [
    "test_benchmarks.py",
    "test_newton_schulz_coefficients.py",
    "test_speech_*.py",
    "test_suite.py",
]
collect_ignore = ["preloaded.py"]  # it is for another process, and ends what begins above
collect_ignore_glob = NEEDING_SPEECH if MISSING else []


def pytest_report_header() -> list[str]:
    """Say what is left out."""
    missing = f"no {', '.join(MISSING)}: left out are {', '.join(collect_ignore_glob)}"
    return [missing] if MISSING else []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many examples the property tests ran; they come from all workers."""
    reports = terminalreporter.stats.get("passed", [])
    counts = [n for each in reports for name, n in each.user_properties if name == "examples"]
    if counts:
        terminalreporter.write_line(f"{sum(counts)} examples of {len(counts)} properties")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long tests first, where several workers share the tests."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not any(name in item.nodeid for name in LONG))


def pytest_collection_finish() -> None:
    """Look for garbage in what the tests make, and not in what was imported for them."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Send all tests of a file that starts its own processes to one worker, largest files first.

    The mark `xdist_group` of pytest-xdist 3.8 has no effect with pytest 9.2, which no longer reads
    the attribute that it sets.
    """
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path, *names = nodeid.split("::")
            group = WITH_FILES.get(names[-1]) if names else None
            return group or ON_ONE_WORKER.get(Path(path).name, nodeid)

    return ByFile(config, log)


@pytest.fixture(autouse=True)
def leaves_no_trace() -> Iterator[None]:
    """Fail a test that leaves its process changed: others would depend on the order of tests."""
    before = process_state()
    yield
    assert not changes(before, process_state())


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of one, over loopback and bounded in time."""
    limit = timedelta(seconds=120)
    store = dist.TCPStore("127.0.0.1", 0, 1, True, limit)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=limit)
    yield
    dist.destroy_process_group()


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked where they would be spawned: they need not import torch again."""
    server = context()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _=None: server)


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    """Four processes with one group, over loopback."""
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def toy_whispers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of a small Whisper for 5 s of audio: after 100 steps it errs, after 240 not."""
    from toy_whisper import make_folders  # which needs the packages of the speech job

    parent = tmp_path_factory.mktemp("whispers")
    folders = {steps: parent / str(steps) for steps in (100, 240)}
    make_folders(folders, 5)
    return folders

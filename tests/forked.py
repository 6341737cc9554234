"""Processes of the tests, forked from one that has imported the large packages already.

To import torch and transformers takes longer than most of what the tests do with them. The server
that is forked has imported no package of ours, and runs nothing before it forks.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import runpy
import signal
import sys
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path

import pytest
import torch


def context() -> BaseContext:
    """Where processes are started; what has a GPU cannot be forked."""
    if torch.cuda.is_available() or "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    server = mp.get_context("forkserver")
    server.set_forkserver_preload(["preloaded"])
    with pytest.MonkeyPatch.context() as patch:  # the server looks there, and nowhere else
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *_given_paths()]))
        forkserver.ensure_running()
    return server


def _given_paths() -> list[str]:
    given = os.environ.get("PYTHONPATH")
    return given.split(os.pathsep) if given else []


class Command:
    """`python -m maxfactor_speech ARGUMENTS`, which heads a session of its own."""

    def __init__(
        self,
        arguments: list[str],
        output: Path,
        script: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start it; what it says goes to files in the folder `output`.

        A script is run in place of the application, and may find more in its environment.
        """
        output.mkdir(parents=True, exist_ok=True)
        self.files = [output / "stdout", output / "stderr"]
        given = (arguments, self.files, script, environment or {})
        self.process = context().Process(target=_run, args=given)  # type: ignore[attr-defined]
        self.process.start()

    @property
    def pid(self) -> int:
        """The process, and its session."""
        return int(self.process.pid)

    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return bool(self.process.is_alive())

    def kill(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        os.kill(self.pid, number)

    def wait(self, seconds: float = 120.0) -> int:
        """Wait for its end; return its exit status, or the signal that ended it, negated."""
        self.process.join(seconds)
        assert not self.is_running(), f"process {self.pid} goes on after {seconds} seconds"
        return int(self.process.exitcode)

    def said(self) -> tuple[str, str]:
        """What it has written so far to stdout and to stderr."""
        return self.files[0].read_text(), self.files[1].read_text()


def _run(
    arguments: list[str], files: list[Path], script: Path | None, environment: dict[str, str]
) -> None:
    if hasattr(os, "setsid"):
        os.setsid()
    for number, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ["OMP_NUM_THREADS"] = "1"  # others run beside it
    os.environ |= environment
    torch.set_num_threads(1)
    if script is not None:
        sys.argv = [str(script), *arguments]
        sys.path[0] = str(script.parent)  # as Python has it
        runpy.run_path(str(script), run_name="__main__")
        return
    sys.argv = ["maxfactor_speech", *arguments]
    runpy.run_module("maxfactor_speech", run_name="__main__", alter_sys=True)

"""The check that every test passes at its end: see `leaves_no_trace` in conftest.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from process_state import changes, process_state


def use_float64() -> None:
    torch.set_default_dtype(torch.float64)


def ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def set_variable() -> None:
    os.environ["MAXFACTOR_LEFT_BEHIND"] = "1"


def use_threads() -> None:
    torch.set_num_threads(2)


@pytest.mark.parametrize(
    ("leave", "name"),
    [
        (use_float64, "torch's default dtype: torch.float32 before, torch.float64 after"),
        (ignore_sigterm, "handlers of signals"),
        (set_variable, "os.environ['MAXFACTOR_LEFT_BEHIND']: None before, '1' after"),
        (use_threads, "torch's threads: 1 before, 2 after"),
    ],
)
def test_what_is_left_behind_is_named(leave: Callable[[], None], name: str) -> None:
    before, handler = process_state(), signal.getsignal(signal.SIGTERM)
    try:
        leave()
        (found,) = changes(before, process_state())
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
        signal.signal(signal.SIGTERM, handler)
        os.environ.pop("MAXFACTOR_LEFT_BEHIND", None)
    assert found.startswith(name)


@pytest.mark.parametrize("is_plugin", [True, False])
def test_the_alarm_of_pytest_timeout_does_not_count(is_plugin: bool) -> None:
    """It ends with the first failure, before the fixtures of the test do."""

    def handler(number: int, frame: Any) -> None:
        raise AssertionError

    if is_plugin:
        handler.__module__ = "pytest_timeout"
    usual = signal.signal(signal.SIGALRM, handler)
    try:
        before = process_state()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        found = changes(before, process_state())
    finally:
        signal.signal(signal.SIGALRM, usual)
    assert bool(found) != is_plugin


def test_the_folder_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = process_state()
    monkeypatch.chdir(tmp_path)
    assert changes(before, process_state()) == [
        f"the folder: {before['the folder']!r} before, {str(tmp_path)!r} after"
    ]

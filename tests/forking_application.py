"""`maxfactor`, whose workers are forked: they need not import torch and transformers again."""

from __future__ import annotations

import multiprocessing
import runpy


def main() -> None:
    """Run the application."""
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _=None: fork  # type: ignore[assignment]
    runpy.run_module("maxfactor_speech", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

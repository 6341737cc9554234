"""Without a GPU the kernels run in Triton's interpreter, which must be chosen before it loads.

Tests run side by side, on small tensors: one thread each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ranks import Ranks

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Torch looks at it once, at the first product of matrices, and trainings on a GPU insist on it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

torch.set_num_threads(1)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of one, over loopback and bounded in time."""
    limit = timedelta(seconds=30)
    store = dist.TCPStore("127.0.0.1", 0, 1, True, limit)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=limit)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    """Four processes with one group, over loopback."""
    ranks = Ranks(4)
    yield ranks
    ranks.stop()

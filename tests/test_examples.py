"""The examples run, as a reader would start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def printed(*command: str) -> str:
    """What a Python command prints, started in the repository with this process's paths."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_a_training_of_thirty_lines() -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed("examples/train.py"))]
    assert losses[0] > 5.0  # of 256 bytes it knows nothing: log(256) is 5.5
    assert losses[-1] < 1.0  # by now it knows its own source


def torchrun(ranks: int, *arguments: str) -> str:
    """What `examples/fsdp2.py` prints, over several processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return printed(*launcher, "examples/fsdp2.py", *arguments)


def test_shards_are_trained_saved_and_loaded(tmp_path: Path) -> None:
    """Also on another number of ranks than they were saved from."""
    pattern = r"loss ([\d.]+) to ([\d.]+)\nnext step: loss ([\d.]+), from the checkpoint ([\d.]+)"
    first = torchrun(2, "--steps", "12", "--checkpoint", str(tmp_path))
    start, end, then, again = map(float, re.findall(pattern, first)[0])
    assert then == again
    assert end < start - 0.5
    second = torchrun(1, "--steps", "1", "--checkpoint", str(tmp_path))
    assert "loaded" in second
    went_on, _, then, again = map(float, re.findall(pattern, second)[0])
    assert then == again
    assert went_on < start - 0.5

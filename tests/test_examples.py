"""The examples run, as a reader would start them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from forked import Command

ROOT = Path(__file__).parent.parent


def printed(script: str, said: Path, *arguments: str, **environment: str) -> str:
    """What an example prints, in a process that has imported torch already."""
    command = Command(list(arguments), said, ROOT / script, environment)
    status, (output, errors) = command.wait(), command.said()
    assert status == 0, errors[-4000:]
    return output


def test_a_training_of_thirty_lines(tmp_path: Path) -> None:
    said = printed("examples/train.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert losses[0] > 5.0  # of 256 bytes it knows nothing: log(256) is 5.5
    assert losses[-1] < 1.0  # by now it knows its own source


def torchrun(ranks: int, *arguments: str) -> str:
    """What `examples/fsdp2.py` prints, over several processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "examples/fsdp2.py", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=120, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def one_rank(said: Path, *arguments: str) -> str:
    """The same in one process, with what torchrun would tell it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    return printed("examples/fsdp2.py", said, *arguments, **told, MASTER_PORT=str(port))


def test_shards_are_trained_saved_and_loaded(tmp_path: Path) -> None:
    """Also on another number of ranks than they were saved from."""
    pattern = r"loss ([\d.]+) to ([\d.]+)\nnext step: loss ([\d.]+), from the checkpoint ([\d.]+)"
    folder = str(tmp_path / "checkpoint")
    first = torchrun(2, "--steps", "12", "--checkpoint", folder)
    start, end, then, again = map(float, re.findall(pattern, first)[0])
    assert then == again
    assert end < start - 0.5
    second = one_rank(tmp_path / "said", "--steps", "1", "--checkpoint", folder)
    assert "loaded" in second
    went_on, _, then, again = map(float, re.findall(pattern, second)[0])
    assert then == again
    assert went_on < start - 0.5

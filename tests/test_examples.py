"""The examples run; several processes are told what `torchrun` would tell them."""

from __future__ import annotations

import re
import socket
from pathlib import Path

from forked import Command

ROOT = Path(__file__).parent.parent


def printed(script: str, said: Path, world: int = 1, *arguments: str) -> str:
    """What the first process of an example prints; all have imported torch already.

    They are told what `torchrun` would tell them.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    commands = []
    for rank in map(str, range(world)):
        own = told | {"RANK": rank, "LOCAL_RANK": rank}
        commands.append(Command(list(arguments), said / rank, ROOT / script, own))
    for command in commands:
        assert command.wait() == 0, command.said()[1][-4000:]
    return commands[0].said()[0]


def test_a_training_of_thirty_lines(tmp_path: Path) -> None:
    said = printed("examples/train.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert losses[0] > 5.0  # of 256 bytes it knows nothing: log(256) is 5.5
    assert losses[-1] < 1.0  # by now it knows its own source


def test_shards_are_trained_saved_and_loaded(tmp_path: Path) -> None:
    """Also on another number of ranks than they were saved from."""
    pattern = r"loss ([\d.]+) to ([\d.]+)\nnext step: loss ([\d.]+), from the checkpoint ([\d.]+)"
    folder = str(tmp_path / "checkpoint")
    given = "--steps", "12", "--checkpoint", folder
    first = printed("examples/fsdp2.py", tmp_path / "two", 2, *given)
    start, end, then, again = map(float, re.findall(pattern, first)[0])
    assert then == again
    assert end < start - 0.5
    given = "--steps", "1", "--checkpoint", folder
    second = printed("examples/fsdp2.py", tmp_path / "one", 1, *given)
    assert "loaded" in second
    went_on, _, then, again = map(float, re.findall(pattern, second)[0])
    assert then == again
    assert went_on < start - 0.5

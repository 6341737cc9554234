"""The messages of a sharded step, counted and predicted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxfactor.recipes import OWN
from measurement import shapes
from ranks import Ranks, mesh_of
from timing import collectives


def small_model() -> dict[str, tuple[int, ...]]:
    """One tensor of each shape from the encoder, and one from the decoder."""
    chosen = {(name.split(".")[1], shape): name for name, shape in shapes("quick").items()}
    return {name: shape for (_, shape), name in chosen.items()}


def counted_messages(shape: list[int]) -> dict[str, list[tuple[str, int]]] | None:
    """What every optimizer sends, on the ranks that take part."""
    mesh = mesh_of(*shape)
    if mesh is None:
        return None
    model = small_model()
    return {each: collectives.counted(each, model, mesh) for each in collectives.CONTENDERS}


@pytest.mark.parametrize("mesh", [[3], [2, 2]], ids=str)
def test_messages_are_as_predicted(
    four: Ranks, mesh: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "shapes", lambda _: small_model())
    ranks = [found for found in four.run(counted_messages, mesh) if found is not None]
    task = {"mesh": mesh, "model": "quick"}
    for contender in collectives.CONTENDERS:
        row = collectives.row_of(task, contender, [found[contender] for found in ranks])
        assert row["as_predicted"], row
        assert len(row["messages"]) <= (4 if contender in OWN else 3)


def adafactor_of_torch() -> list[dict[str, str]] | None:
    mesh = mesh_of(2)
    return None if mesh is None else collectives.torch_adafactor(mesh)


def test_the_command_that_counts_messages(
    four: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = four.run(adafactor_of_torch)[0]
    rows = [collectives.row_of({"mesh": [2], "model": "quick"}, "torch AdamW", [[], []])]
    monkeypatch.setattr(collectives, "measure", lambda _, __: (rows, outcomes))
    out = tmp_path / "results" / "messages.json"
    collectives.main(["--quick", "--out", str(out)])
    printed, result = capsys.readouterr().out, json.loads(out.read_text())
    assert "quality        1024   4" in printed
    assert len(result["on_paper"]) == len(collectives.CONTENDERS) * 3
    assert "as predicted" in printed
    assert str(tmp_path) not in out.read_text()
    assert [row["outcome"].split()[0] for row in outcomes] == ["wrong", "raises", "wrong"]


def test_the_cost_model() -> None:
    """By hand: two matrices and a vector on four ranks."""
    model = {"a": (4, 6), "b": (2, 8), "c": (5,)}
    first = 4 * ((6 + 5) + (8 + 5) + 5)  # W² in three parts, G², whether all is finite
    expected = [("sum", first), ("max", 4 * 2), ("max", 4 * (1 + 1 + 2))]
    found = collectives.predicted(model, "published-1.0", 4)
    assert [(message.kind, message.bytes) for message in found] == expected
    a = collectives.LATENCY
    assert collectives.ring(4) == pytest.approx(6 * a)
    assert collectives.tree(5) == pytest.approx(6 * a)
    seconds = collectives.seconds(found[0], 4, collectives.ring)
    assert seconds == pytest.approx(6 * a + 1.5 * first / collectives.BANDWIDTH)
    most = collectives.busiest({"hidden.0": (4, 6), "hidden.1": (2, 8)}, "quality", 4)
    assert most.elements == 24
    assert most.seconds(4, 2) == pytest.approx(2 * (3 * a + 36 / collectives.BANDWIDTH))


def test_the_tables_of_the_document() -> None:
    """They are what the script prints of the results that are kept."""
    root = Path(__file__).parent.parent
    result = json.loads((root / "benchmarks/results/collectives.json").read_text())
    text = (root / "docs/distributed.md").read_text()
    for part in collectives.as_markdown(result).split("\n\n"):
        assert part in text
    assert all(row["as_predicted"] for row in result["measured"])
    for row in result["on_paper"]:
        again = collectives.on_paper(row["model"], row["optimizer"], row["ranks"])
        assert again == pytest.approx(row)

"""The benchmark that chooses coefficients of the Newton-Schulz steps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from maxfactor.rule.newton_schulz import COEFFICIENTS
from studies import newton_schulz_coefficients as study


def test_the_error_of_a_minimax_quintic_alternates() -> None:
    for low, high in ((1e-3, 1.0), (0.1, 1.2), (0.9, 1.1)):
        coefficients, error = study.minimax(low, high)
        values = study.iterated(np.linspace(low, high, 20_001), [coefficients]) - 1.0
        assert np.abs(values).max() == pytest.approx(error, rel=1e-5)
        inner = values[1:-1][np.diff(np.sign(np.diff(values))) != 0]
        signs = np.sign([values[0], *inner, values[-1]])
        assert signs.tolist() == [-1.0, 1.0, -1.0, 1.0]


def test_steps_bring_all_singular_values_near_one() -> None:
    """Five of them from 0.001 on; rounding beyond 1 does no harm."""
    values = study.iterated(np.geomspace(1e-3, 1.0, 5_000), study.chain(1e-3))
    assert 0.85 < values.min() < values.max() < 1.15
    assert study.iterated(np.array([1.005]), study.chain(1e-3))[0] < 1.15


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "spectra.json"
    options = ["--tasks", "llama", "--cache", str(tmp_path), "--out", str(out)]
    study.main(["record", "--quick", *options])
    [(task, spectra)] = json.loads(out.read_text())["spectra"].items()
    assert task == "llama"
    for values in spectra:  # sorted, of matrices with norm 1
        assert values == sorted(values)
        assert np.square(values).sum() == pytest.approx(1.0, rel=0.02)
    study.main(["choose", "--out", str(out)])
    choice = json.loads(capsys.readouterr().out)
    assert len(choice["coefficients"]) == study.STEPS
    arrays = [np.array(values) for values in spectra]
    assert choice["fixed"]["llama"] == round(study.deviation(arrays, COEFFICIENTS), 4)
    assert choice["chosen"]["llama"] <= choice["fixed"]["llama"]

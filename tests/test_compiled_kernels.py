"""The kernels compile for a GPU: Triton's interpreter accepts what its compiler refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from soak import IS_SOAK

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests on the GPU compile them")
ROOT = Path(__file__).resolve().parent.parent
LAUNCH = re.compile(r"^\s+(\w+)\[\(", re.MULTILINE)


def launched() -> set[str]:
    """The kernels that the backend launches."""
    files = (ROOT / "src/maxfactor/backends/triton").glob("*.py")
    return {name for file in files for name in LAUNCH.findall(file.read_text())}


@pytest.mark.parametrize("capability", [80, 90] if IS_SOAK else [90])
def test_kernels_compile(capability: int, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests/compile_kernels.py"), str(capability)]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    del environment["TRITON_INTERPRET"]
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *sys.path])
    done = subprocess.run(
        [*command, *([] if IS_SOAK else ["--check"])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600 if IS_SOAK else 200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    compiled = json.loads(done.stdout.splitlines()[-1])
    assert set(compiled) == launched()

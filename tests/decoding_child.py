"""Decode files in a process of its own, because a decoder written in C may crash or hang.

As a program, this reads one job per line, {"path": …, "start": …, "seconds": …}, and answers with
one line: what training would do with the recording, and what `transcribe` would.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

LIMIT = 30.0  # seconds that a file may take
MEMORY = 3 * 2**30  # bytes of address space, most of which is that of libraries


class Outcome(NamedTuple):
    """What became of a file."""

    training: str  # "kept", or why it is left out
    detail: str
    whole: str  # "read", or the InputError of reading all of it
    raw: str  # the traceback of any other error
    peak: int  # bytes that the process has taken so far
    base: int  # bytes that it had taken before the first file


class DecodingChild:
    """A process that decodes files, started again after a crash."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def decode(self, path: Path, start: float = 0.0, seconds: float | None = None) -> Outcome:
        """Screen and read a file; AssertionError if the process crashes or hangs."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        job = {"path": str(path), "start": start, "seconds": seconds}
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        is_ready = select.select([process.stdout], [], [], LIMIT)[0]
        answer = process.stdout.readline() if is_ready else ""
        if not answer:
            self.stop()
            what = f"crashed with status {process.returncode}" if is_ready else "hung"
            raise AssertionError(f"the decoder {what} on {path} ({path.stat().st_size} bytes)")
        return Outcome(**json.loads(answer))

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # libmpg123 writes remarks
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
            text=True,
        )


def _answer(job: dict[str, Any]) -> dict[str, str]:
    from maxfactor_speech.data.audio import read, samples_in
    from maxfactor_speech.data.recordings import Recording
    from maxfactor_speech.data.screening import screen, screen_decoded
    from maxfactor_speech.errors import InputError

    path = Path(job["path"])
    kept, left_out = screen([Recording(path, "x", job["start"], job["seconds"])])
    if kept:
        kept, left_out = screen_decoded(kept)
    assert len(kept) + len(left_out) == 1
    found = {"training": "kept", "detail": "", "whole": "read", "raw": ""}
    if left_out:
        found |= {"training": left_out[0].reason, "detail": left_out[0].detail}
    try:
        samples_in(path)
        read(path)
    except InputError as error:
        found["whole"] = str(error)
    return found


def _serve() -> None:
    import resource

    import numpy as np
    import soundfile

    from maxfactor_speech.data import screening

    def peak() -> int:
        status = Path("/proc/self/status")  # getrusage counts what the parent has taken, too
        if not status.exists():
            return 0
        [line] = [one for one in status.read_text().splitlines() if one.startswith("VmHWM")]
        return int(line.split()[1]) * 1024

    assert soundfile
    assert screening
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    np.seterr(over="raise", invalid="raise", divide="raise")  # warnings are errors in the tests
    base = peak()
    for line in sys.stdin:
        found = {"training": "", "detail": "", "whole": "", "raw": ""}
        try:
            found = _answer(json.loads(line))
        except BaseException:  # the parent looks at it
            found["raw"] = traceback.format_exc()
        print(json.dumps({**found, "peak": peak(), "base": base}), flush=True)


if __name__ == "__main__":
    _serve()

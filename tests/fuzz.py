"""Run the property tests with one random seed after the other: `make fuzz MINUTES=10`.

Stops at the first failure, with the example that hypothesis found and the command that runs it
again.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path

TESTS = (
    "tests/test_properties.py",
    "tests/test_property_machines.py",
    "tests/test_speech_fuzz.py",
    "tests/test_speech_bad_folders.py",
)
ROOT = Path(__file__).resolve().parent.parent


def run(seed: int) -> subprocess.CompletedProcess[str]:
    """All properties with the examples of one seed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS]
    environment = {**os.environ, "MAXFACTOR_FUZZ_SEED": str(seed)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def main() -> int:
    """Return 0 if no property failed in the time given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=0.0, help="0: until it is stopped")
    parser.add_argument("--seed", type=int, help="run the examples of this seed alone")
    given = parser.parse_args()
    began, rounds, examples = time.monotonic(), 0, 0
    try:
        while given.minutes == 0.0 or time.monotonic() - began < 60.0 * given.minutes:
            seed = secrets.randbelow(2**32) if given.seed is None else given.seed
            result = run(seed)
            if result.returncode != 0:
                print(result.stdout[-20_000:], result.stderr[-2_000:], sep="\n")
                print(f"A property failed. Run it again: python tests/fuzz.py --seed {seed}")
                return 1
            found = re.search(r"(\d+) examples of", result.stdout)
            rounds, examples = rounds + 1, examples + int(found.group(1) if found else 0)
            print(f"round {rounds}, seed {seed}: {examples} examples so far", flush=True)
            if given.seed is not None:
                break
    except KeyboardInterrupt:
        print()
    print(f"{examples} examples in {rounds} rounds: no property failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

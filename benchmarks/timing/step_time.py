"""Times of optimizer steps, and memory: `maxfactor bench` without the package's extras.

python benchmarks/timing/step_time.py                             # Whisper-tiny on the CPU
python benchmarks/timing/step_time.py --device cuda --model whisper-large-v3
python benchmarks/timing/step_time.py --optimizers quality,adamw --out FILE.json
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # benchmarks/

from measurement import time_steps

if __name__ == "__main__":
    time_steps()

"""How long a step takes, and how much memory: `maxfactor bench`, without the package's extras.

python benchmarks/step_time.py                                    # Whisper-tiny on the CPU
python benchmarks/step_time.py --device cuda --model whisper-large-v3 --dtype float32 bfloat16
python benchmarks/step_time.py --optimizers MaxFactor AdamW --out benchmarks/results/mine.json
"""

from __future__ import annotations

from maxfactor_speech.bench.step_time import main

if __name__ == "__main__":
    main()

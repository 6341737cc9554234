"""What share of a real training step the optimizer has: forward and backward of a Whisper.

    python benchmarks/training_step.py --device cuda --model large-v3 --batch 8 --out FILE.json
    python benchmarks/training_step.py --quick        # a tiny model on the CPU

The model comes from `transformers` by its configuration, with random weights; inputs are noise of
30 seconds and 100 tokens. Weights and gradients are float32, the arithmetic bfloat16 by autocast.
Times are medians with a wait at the end of each part.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import WhisperConfig, WhisperForConditionalGeneration

import maxfactor
from maxfactor_speech.bench.step_time import circumstances, state_bytes, write

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TOKENS = 100
SIZES: dict[str, dict[str, int]] = {  # width, layers of each side, heads, mel bands, vocabulary
    "quick": {"d": 16, "layers": 1, "heads": 2, "mels": 8, "vocabulary": 51},
    "tiny": {"d": 384, "layers": 4, "heads": 6, "mels": 80, "vocabulary": 51865},
    "large-v3": {"d": 1280, "layers": 32, "heads": 20, "mels": 128, "vocabulary": 51866},
}


def whisper(size: str) -> Any:
    """A Whisper of one of the published sizes."""
    own = SIZES[size]
    config = WhisperConfig(
        vocab_size=own["vocabulary"],
        num_mel_bins=own["mels"],
        d_model=own["d"],
        encoder_layers=own["layers"],
        decoder_layers=own["layers"],
        encoder_attention_heads=own["heads"],
        decoder_attention_heads=own["heads"],
        encoder_ffn_dim=4 * own["d"],
        decoder_ffn_dim=4 * own["d"],
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return WhisperForConditionalGeneration(config)


def optimizers(model: nn.Module) -> dict[str, Callable[[], Any]]:
    """Our recipes and what they are compared with."""
    ours = {name: (lambda name=name: maxfactor.for_model(model, name)) for name in RECIPES}
    on_gpu = next(model.parameters()).is_cuda
    return ours | {
        "torch AdamW fused": lambda: torch.optim.AdamW(model.parameters(), 1e-5, fused=on_gpu)
    }


RECIPES = ("1.0", "lean", "fam", "speech")


def milliseconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """The median time of a call, the wait for the device included."""
    times = []
    for _ in range(repeats + 1):  # the first one compiles and allocates
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * median(times[1:])


def measure(size: str, batch: int, device: str, repeats: int) -> dict[str, Any]:
    """Forward and backward once, then a step of each optimizer."""
    with torch.device(device):
        model = whisper(size)
        own = SIZES[size]
        audio = torch.randn(batch, own["mels"], 3000)
        tokens = torch.randint(3, own["vocabulary"], (batch, TOKENS))
    count = sum(param.numel() for param in model.parameters())

    def forward_backward() -> None:
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_features=audio, labels=tokens).loss
        loss.backward()

    training = milliseconds(forward_backward, device, repeats)
    rows = []
    for name, make in optimizers(model).items():
        optimizer = make()
        ms = milliseconds(optimizer.step, device, repeats)
        per_param = state_bytes(optimizer) / count
        rows.append({"optimizer": name, "ms": ms, "share": ms / (ms + training)})
        rows[-1]["state bytes per parameter"] = per_param
        print(f"{name:20} {ms:8.1f} ms  {ms / (ms + training):6.1%}  {per_param:.2f} B/param")
        del optimizer
    return {"forward and backward ms": training, "parameters": count, "rows": rows}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="tiny", choices=tuple(SIZES))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one repeat")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    if options.quick:
        options.model, options.batch, options.repeats = "quick", 1, 1
    result = measure(options.model, options.batch, options.device, options.repeats)
    print(f"forward and backward {result['forward and backward ms']:.1f} ms")
    settings = {"model": options.model, "batch": options.batch, "seconds": 30, "tokens": TOKENS}
    report = {**circumstances(options.device), "settings": settings, **result}
    if options.out is not None:
        write(options.out, report)
    return report


if __name__ == "__main__":
    main()

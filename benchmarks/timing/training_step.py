"""The optimizer's share of a training step: forward and backward pass of a Whisper beside it.

    python benchmarks/timing/training_step.py --device cuda --model large-v3 --out FILE.json
    python benchmarks/timing/training_step.py --quick        # a tiny model on the CPU

The model comes from `transformers` by its configuration, with random weights; inputs are noise of
30 seconds and 100 tokens. Weights and gradients are float32, the arithmetic bfloat16 by autocast.
Times are medians that include a wait for the device, after a warm-up.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import WhisperConfig, WhisperForConditionalGeneration

import maxfactor

sys.path.append(str(Path(__file__).resolve().parents[1]))  # benchmarks/

from measurement import Record, circumstances, milliseconds, state_bytes_per_parameter, write_json

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
    """Our recipes, and AdamW."""
    ours = {name: (lambda name=name: maxfactor.for_model(model, name)) for name in RECIPES}
    on_gpu = next(model.parameters()).is_cuda
    return ours | {
        "torch AdamW fused": lambda: torch.optim.AdamW(model.parameters(), 1e-5, fused=on_gpu)
    }


RECIPES = ("published-1.0", "lean", "fast", "quality")


def measure(size: str, batch: int, device: str, repeats: int) -> Record:
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
        per_param = state_bytes_per_parameter([optimizer], count)
        row = {"optimizer": name, "ms": ms, "share": ms / (ms + training)}
        rows.append({**row, "state_bytes_per_parameter": per_param})
        print(f"{name:20} {ms:8.1f} ms  {ms / (ms + training):6.1%}  {per_param:.2f} B/param")
        del optimizer
    return {"forward_backward_ms": training, "parameters": count, "rows": rows}


def main(argv: Sequence[str] | None = None) -> Record:
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
    print(f"forward and backward {result['forward_backward_ms']:.1f} ms")
    settings = {"model": options.model, "batch": options.batch, "seconds": 30, "tokens": TOKENS}
    report = {**circumstances(options.device), "settings": settings, **result}
    if options.out is not None:
        write_json(options.out, report)
    return report


if __name__ == "__main__":
    main()

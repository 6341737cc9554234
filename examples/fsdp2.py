"""A small transformer over several processes: FSDP2, MaxFactor, a checkpoint that reshards.

    torchrun --nproc-per-node 2 examples/fsdp2.py
    torchrun --nproc-per-node 3 examples/fsdp2.py --checkpoint out/fsdp2    # saves there
    torchrun --nproc-per-node 2 examples/fsdp2.py --checkpoint out/fsdp2    # resumes from there

Processes use one GPU each and NCCL, or the CPU and gloo. The model learns the bytes of this file.
FSDP needs no setting of MaxFactor: build the optimizer after `fully_shard`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import maxfactor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from maxfactor.recipes import RecipeName

TEXT = torch.tensor(list(Path(__file__).read_bytes()))
WIDTH, LAYERS, HEADS, LENGTH, BATCH = 48, 2, 4, 64, 8


class Model(nn.Module):
    """A decoder of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits of the byte that follows each position."""
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        x = self.embedding(text) + self.positions.weight[:length]
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(x.flatten(0, 1))
        return logits


def build(recipe: RecipeName, mesh: DeviceMesh) -> tuple[nn.Module, maxfactor.MaxFactor]:
    """A sharded model and its optimizer; each rank holds a few rows of every matrix."""
    torch.manual_seed(0)  # the same weights on all ranks, before each keeps its shard
    model = Model().to(mesh.device_type)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, maxfactor.for_model(model, recipe)


def batch(generator: torch.Generator, device: str) -> Tensor:
    """Pieces of the text, with one more character than the model reads."""
    starts = torch.randint(len(TEXT) - LENGTH, (BATCH, 1), generator=generator)
    return TEXT[starts + torch.arange(LENGTH + 1)].to(device)


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    """The mean over the characters of this rank's batch, in nats."""
    return cross_entropy(model(text[:, :-1]), text[:, 1:].flatten())


def train(
    model: nn.Module, optimizer: maxfactor.MaxFactor, steps: int, mesh: DeviceMesh
) -> list[float]:
    """Take some steps; return the loss of each, averaged over the ranks."""
    generator = torch.Generator().manual_seed(dist.get_rank())  # every rank reads different text
    losses = []
    for _ in range(steps):
        loss = loss_of(model, batch(generator, mesh.device_type))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average = loss.detach().clone()
        dist.all_reduce(average)
        losses.append(float(average) / dist.get_world_size())
    return losses


def save(model: nn.Module, optimizer: maxfactor.MaxFactor, folder: Path) -> None:
    """Each rank writes its shards; the checkpoint describes the whole tensors."""
    weights, state = get_state_dict(model, optimizer)
    write({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: maxfactor.MaxFactor, folder: Path) -> None:
    """Read this rank's shards, whatever number of ranks wrote the checkpoint."""
    weights, state = get_state_dict(model, optimizer)
    content: dict[str, Any] = {"model": weights, "optimizer": state}
    read(content, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"]
    )


def run(recipe: RecipeName, steps: int, folder: Path, mesh: DeviceMesh) -> None:
    """Train, save, load into a new model and optimizer, and compare their next steps."""
    say = print if dist.get_rank() == 0 else (lambda *_: None)
    model, optimizer = build(recipe, mesh)
    if (folder / ".metadata").exists():
        load(model, optimizer, folder)
        say(f"loaded {folder.name}, written by any number of ranks")
    say(optimizer.describe())
    losses = train(model, optimizer, steps, mesh)
    say(f"{mesh.size()} ranks, {steps} steps: loss {losses[0]:.4f} to {losses[-1]:.4f}")
    save(model, optimizer, folder)
    expected = train(model, optimizer, 1, mesh)
    again, fresh = build(recipe, mesh)
    load(again, fresh, folder)
    found = train(again, fresh, 1, mesh)
    say(f"next step: loss {expected[0]:.4f}, from the checkpoint {found[0]:.4f}")


def main(argv: Sequence[str] | None = None) -> None:
    """Set up the process group that torchrun started, and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--recipe", default="quality")
    parser.add_argument("--checkpoint", type=Path, help="folder to save to and to resume from")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/fsdp2.py")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    with tempfile.TemporaryDirectory() as scratch:
        folders = [str(options.checkpoint or scratch)]  # all ranks use that of the first
        dist.broadcast_object_list(folders)
        run(options.recipe, options.steps, Path(folders[0]), mesh)
        dist.barrier()  # the first rank must not delete the folder while others read it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

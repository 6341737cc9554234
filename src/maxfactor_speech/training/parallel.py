"""One training in several processes: what they tell each other, and how the model is spread.

`torchrun` starts the processes, torch's own engines (DDP, FSDP2) spread the model, and the batches
are those of one process, each cut into as many parts as there are processes. So nothing that is
computed depends on their number but the order of sums.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from maxfactor_speech.data.audio import InputError
from maxfactor_speech.training.model import loss_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import WhisperForConditionalGeneration

SHARDINGS = ("ddp", "fsdp", "hsdp")
PATIENCE = timedelta(hours=1)  # the first process may have speech to synthesise

T = TypeVar("T")


class Pass(nn.Module):
    """The loss as a module, so that torch's engines see its forward pass."""

    def __init__(self, model: WhisperForConditionalGeneration) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of the labels."""
        return loss_of(self.model, features, labels)


class Alone:
    """A training in one process: nobody to tell, nothing to spread."""

    rank, world = 0, 1
    spreads = False  # whether an engine of torch's sends gradients about
    cutters: ProcessGroup | None = None  # processes that have a part of each parameter

    @property
    def cuts(self) -> bool:
        """Whether parameters are cut into parts."""
        return self.cutters is not None

    def device(self, wanted: torch.device) -> torch.device:
        """The device of this process."""
        return wanted

    def total(self, number: int) -> int:
        """The sum over all processes."""
        return number

    def mean(self, number: float) -> float:
        """The mean over all processes."""
        return number

    def dealt(self, mine: Sequence[T]) -> list[T]:
        """What was dealt out one by one to the processes, in order."""
        return list(mine)

    def together(self, call: Callable[[], T]) -> T:
        """Do something on every process; where it fails on one, all of them stop."""
        return call()

    def first_alone(self, call: Callable[[], T]) -> T:
        """Do something on every process, on the first of each machine before the others."""
        return call()

    def spread(self, model: WhisperForConditionalGeneration) -> nn.Module:
        """The forward pass of a model that the processes share; the model is spread in place."""
        return Pass(model)

    @contextmanager
    def adding_up(self, spread: nn.Module, is_last: bool) -> Iterator[None]:  # noqa: ARG002
        """Passes in it add to the gradients; the last one of a step makes them everybody's."""
        yield


class Ranks(Alone):
    """A training in several processes.

    Args:
        shard: "ddp": each has the whole model. "fsdp": each has a part of each parameter. "hsdp":
            parts within groups of processes, copies between them.
        device_type: "cpu" or "cuda".
    """

    spreads = True

    def __init__(self, shard: str, device_type: str) -> None:
        self.shard = shard
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._local = int(os.environ.get("LOCAL_RANK", self.rank))
        self._here = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        self._device_type = device_type
        # Numbers of the host, which must not wait for the GPU.
        self._host = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.cutters = None if shard == "ddp" else self._host

    def device(self, wanted: torch.device) -> torch.device:
        """A GPU for each process of a machine, where they are not on the CPU."""
        if wanted.type != "cuda":
            return wanted
        if self._here > torch.cuda.device_count():
            raise InputError(
                f"{self._here} processes on a machine with {torch.cuda.device_count()} GPUs; "
                f"start as many as there are GPUs with --nproc-per-node"
            )
        device = torch.device("cuda", self._local)
        torch.cuda.set_device(device)
        return device

    def total(self, number: int) -> int:
        """The sum over all processes."""
        return int(self._summed(torch.tensor(number)))

    def mean(self, number: float) -> float:
        """The mean over all processes."""
        return float(self._summed(torch.tensor(number, dtype=torch.float64))) / self.world

    def dealt(self, mine: Sequence[T]) -> list[T]:
        """What was dealt out one by one to the processes, in order."""
        boxed = [[[one] for one in own] for own in self._gathered(list(mine))]
        rounds = zip_longest(*boxed, fillvalue=[])
        return [one for box in chain.from_iterable(rounds) for one in box]

    def together(self, call: Callable[[], T]) -> T:
        """Do something on every process; where it fails on one, all of them stop."""
        failure: Exception | None = None
        try:
            result = call()
        except Exception as error:  # whatever it is, the others must not wait in vain
            failure = error
        reasons = [one for one in self._gathered(failure and str(failure)) if one is not None]
        if failure is not None and not isinstance(failure, InputError):
            raise failure
        if reasons:
            raise InputError(reasons[0]) from failure
        return result

    def first_alone(self, call: Callable[[], T]) -> T:
        """Do something on every process, on the first of each machine before the others."""
        first = self.together(call) if self._local == 0 else self.together(lambda: None)
        rest = self.together(call) if self._local != 0 else self.together(lambda: None)
        result = first if self._local == 0 else rest
        assert result is not None
        return result

    def spread(self, model: WhisperForConditionalGeneration) -> nn.Module:
        """The forward pass of a model that the processes share; the model is spread in place."""
        forward = Pass(model)
        if not self.cuts:
            devices = [self._local] if self._device_type == "cuda" else None
            return nn.parallel.DistributedDataParallel(forward, devices)
        from torch.distributed.fsdp import fully_shard

        mesh = self._mesh()
        for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
            fully_shard(layer, mesh=mesh)
        fully_shard(forward, mesh=mesh)
        return forward

    @contextmanager
    def adding_up(self, spread: Any, is_last: bool) -> Iterator[None]:
        """Passes in it add to the gradients; the last one of a step makes them everybody's."""
        if self.cuts:
            spread.set_requires_gradient_sync(is_last)
            yield
        elif is_last:
            yield
        else:
            with spread.no_sync():
                yield

    def _mesh(self) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        if self.shard == "fsdp":
            return init_device_mesh(self._device_type, (self.world,))
        # Parts within a machine, where messages are fast; on one machine alone, two copies.
        group = self._here if self._here < self.world else self.world // 2
        shape = (self.world // group, group)
        return init_device_mesh(self._device_type, shape, mesh_dim_names=("copies", "parts"))

    def _summed(self, number: Tensor) -> Tensor:
        dist.all_reduce(number, group=self._host)
        return number

    def _gathered(self, mine: T) -> list[T]:
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine, group=self._host)
        return found


def is_first() -> bool:
    """Whether this is the process that speaks for all."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def started(shard: str | None, device: torch.device) -> Iterator[Alone]:
    """The processes of a training, as `torchrun` started them, or this one alone.

    Args:
        shard: One of `SHARDINGS`; None for one process.
        device: The kind of device to train on.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    _check(shard, world)
    if shard is None:
        yield Alone()
        return
    is_mine = not dist.is_initialized()
    if is_mine:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=PATIENCE)
    try:
        yield Ranks(shard, device.type)
    finally:
        if is_mine:
            dist.destroy_process_group()


def check_batch(batch_size: int, world: int) -> None:
    """Refuse a batch that cannot be cut into equal parts."""
    if batch_size % world:
        near = -(-batch_size // world) * world
        raise InputError(
            f"--batch-size {batch_size} cannot be shared by {world} processes, which all together "
            f"take one batch; take a multiple of {world}, such as {near}"
        )


def _check(shard: str | None, world: int) -> None:
    if shard is None:
        if world > 1:
            raise InputError(
                f"torchrun started {world} processes, but each would train alone; add --shard "
                f"with one of {', '.join(SHARDINGS)}"
            )
        return
    if shard not in SHARDINGS:
        raise InputError(f"--shard must be one of {', '.join(SHARDINGS)}, got {shard!r}")
    if "RANK" not in os.environ:
        raise InputError(
            f"--shard {shard} needs several processes: torchrun --nproc-per-node 2 -m maxfactor "
            f"train --shard {shard} …"
        )
    if shard == "hsdp" and (world < 4 or world % 2):
        raise InputError(
            f"--shard hsdp needs an even number of processes, at least 4, got {world}; "
            "--shard fsdp takes any"
        )

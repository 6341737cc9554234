"""Files of `torch.distributed.checkpoint`, read without running what they contain.

Torch reads their metadata, and all values that are no tensors, with pickle, which runs any code
that is in them. Here both are looked at first, and refused if they name anything but plain values.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from maxfactor_speech.errors import InputError, failure_reason

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.checkpoint.planner import ReadItem

PATHS = ("pathlib", "pathlib._local")
ALLOWED = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    **dict.fromkeys(PATHS, ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
}


def check_metadata(folder: Path) -> None:
    """Raise InputError if the metadata of a folder contains more than metadata."""
    for path in sorted(folder.glob("*.metadata")):
        try:
            with path.open("rb") as file:
                _PlainUnpickler(file).load()
        except Exception as error:  # a damaged file can make pickle raise anything
            raise InputError(f"{path}: cannot be read, {failure_reason(error)}") from error


class CheckedPlanner(DefaultLoadPlanner):
    """Loads values into a state; those that are more than plain values are refused."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Check a value that is no tensor, then let torch read it."""
        torch.load(io.BytesIO(value.getvalue()), map_location="cpu", weights_only=True)
        super().load_bytes(read_item, value)


class _PlainUnpickler(pickle.Unpickler):
    """Builds what metadata consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no metadata")
        return super().find_class(module, name)

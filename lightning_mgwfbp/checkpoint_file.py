"""`WholeCheckpointIO`: a checkpoint is written whole, or the one before it is still there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override


class WholeCheckpointIO(TorchCheckpointIO):
    """Lightning's, but that a local file is written beside the old one, and then takes its place.

    Lightning's own writes into the system's temporary folder. Where that is another file system the
    last move is a copy, and one that is cut short (a full disk, a kill) leaves a part of a file in
    the place of the last good checkpoint.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part")  # of one name: what a kill left is reused
        try:
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

"""Several tensors in one message of bytes, so that they cost one start-up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 8  # bytes: a view as any dtype must start at a multiple of its itemsize


def join(parts: Sequence[Tensor]) -> Tensor:
    """Return one message, (nbytes,) of uint8, that holds all `parts`, contiguous ones, in order."""
    sizes = [_padded(part.nbytes) for part in parts]
    message = torch.zeros(sum(sizes), dtype=torch.uint8, device=parts[0].device)
    for place, part in zip(message.split(sizes), parts, strict=True):
        place[: part.nbytes].copy_(part.reshape(-1).view(torch.uint8))
    return message


def nbytes(parts: Sequence[Tensor]) -> int:
    """Size of the message that `parts` would be joined into."""
    return sum(_padded(part.nbytes) for part in parts)


def take_apart(message: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return views of the tensors that `message`, (nbytes,), was joined from.

    Args:
        like: tensors of their shapes and dtypes, such as this rank's own.
    """
    places = message[: nbytes(like)].split([_padded(part.nbytes) for part in like])
    return tuple(
        place[: part.nbytes].view(part.dtype).view(part.shape)
        for place, part in zip(places, like, strict=True)
    )


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

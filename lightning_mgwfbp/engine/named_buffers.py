"""`NamedBuffers`: the buffers of a module that its ranks share, and whether they are others now."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

Kind = tuple[str, torch.Size, torch.dtype, torch.layout, bool]


class NamedBuffers:
    """What was found in a module when somebody last looked, beside what the ranks have agreed on.

    Args:
        module: whose buffers, with those of all modules in it.
        ignored: returns the names of those that are not shared.
    """

    def __init__(self, module: nn.Module, ignored: Callable[[], Collection[str]]) -> None:
        self._module = module
        self._ignored = ignored
        self._agreed: list[Kind] = []
        self.look()
        self.agree()

    def look(self) -> list[tuple[str, Tensor]]:
        """Return those that are there now, by name, in the order of registration."""
        ignored, seen = self._ignored(), set()
        self._places: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
        found = []
        for prefix, owner in self._module.named_modules():
            for key, buffer in owner._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                if buffer is None or id(buffer) in seen or name in ignored:
                    continue
                seen.add(id(buffer))
                self._places.append((owner._buffers, key, buffer))
                found.append((name, buffer))
        self._found = [(name, b.shape, b.dtype, b.layout, _is_expanded(b)) for name, b in found]
        return found

    def agree(self) -> None:
        """Take those that were found last for what all ranks have."""
        self._agreed = self._found

    def have_changed(self) -> bool:
        """Whether some have come or gone, or have another shape, dtype or layout than was agreed
        on. Looks anew only where one was put in the place of another since the last look."""
        if any(owner.get(key) is not buffer for owner, key, buffer in self._places):
            self.look()
        return self._found != self._agreed


def _is_expanded(buffer: Tensor) -> bool:
    return buffer.layout == torch.strided and 0 in buffer.stride()

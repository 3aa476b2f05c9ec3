"""`FirstUse`: sees every torch function before it reads; and what it does not see."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_mgwfbp.measure.module_hooks import is_compiled

# What asks about a tensor, not for its numbers.
_METADATA = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "requires_grad")),
        *(getattr(Tensor, name).__get__ for name in ("is_leaf", "ndim", "layout", "is_sparse")),
        *(getattr(Tensor, name) for name in ("size", "dim", "numel", "stride", "is_contiguous")),
        *(getattr(Tensor, name) for name in ("is_floating_point", "is_complex", "__len__")),
        *(getattr(Tensor, name) for name in ("element_size", "ndimension", "__hash__")),
    )
)

_is_compiling = torch.compiler.is_compiling
_is_transformed = torch._C._functorch.peek_interpreter_stack


class FirstUse(TorchFunctionMode):
    """Calls `finish(found)` before each torch function that may read numbers in known memory.

    Args:
        places: what is known, by `address_of`; it may change.
        finish: told all that `places` has for the memory of a function's arguments.
        finish_all: called before functions under torch.func, which wraps tensors.
    """

    def __init__(
        self,
        places: Mapping[int, Collection[int]],
        finish: Callable[[set[int]], None],
        finish_all: Callable[[], None],
    ) -> None:
        super().__init__()
        self._places = places
        self._finish = finish
        self._finish_all = finish_all

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if (
            self._places and not _is_compiling()
        ):  # in a few microseconds: this comes before every function
            found = _found(self._places, args)
            if kwargs:
                found += _found(self._places, kwargs.values())
            if found and func not in _METADATA:
                self._finish(set(found))
            elif _is_transformed():
                self._finish_all()
        return func(*args, **kwargs) if kwargs else func(*args)


def _found(places: Mapping[int, Collection[int]], values: Iterable[Any]) -> tuple[int, ...]:
    found: tuple[int, ...] = ()
    for value in values:
        if isinstance(value, Tensor):
            try:
                address = value.untyped_storage().data_ptr()
            except (NotImplementedError, RuntimeError):
                continue
            if address in places:
                found += tuple(places[address])
        elif isinstance(value, list | tuple):
            found += _found(places, value)
        elif isinstance(value, dict):
            found += _found(places, value.values())
    return found


def address_of(tensor: Tensor) -> int:
    """Where its memory begins, the same for all views and aliases; 0 where it has none itself."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse ones; their values have
        return 0


def has_unseen_code(modules: Iterable[nn.Module]) -> bool:
    """Whether one of them is scripted, or compiled by `module.compile()` or `torch.compile`."""
    return any(isinstance(m, torch.jit.ScriptModule) or is_compiled(m) for m in modules)


def scripted_functions_exist() -> bool:
    """Whether any function of this process is scripted, whoever calls it."""
    compiled: Any = torch.jit._state._python_cu  # whose stub says that it returns None
    return bool(compiled.get_functions())

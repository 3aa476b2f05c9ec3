"""`modes_suspended`: a step in the middle of a forward, and outside of what that forward is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

_C: Any = torch._C  # whose stubs lack _set_tracing_state


@contextmanager
def modes_suspended() -> Iterator[None]:
    """Within, torch computes as if no mode, transform, inference_mode or tracing were on.

    What traces (torch.jit.trace, make_fx) would record a step that is completed within.
    """
    graph = _C._get_tracing_state()
    _C._set_tracing_state(None)
    try:
        with (
            torch._C.DisableTorchFunction(),
            torch.inference_mode(False),
            temporarily_clear_interpreter_stack(),
            _disable_current_modes(),
        ):
            yield
    finally:
        _C._set_tracing_state(graph)

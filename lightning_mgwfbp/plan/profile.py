"""What was measured, as frozen records: the model's backward pass, and what ran when.

Index 0 is always the first gradient that backward produces; gradient i is ready
`r_i = b_0 + ... + b_i` seconds after backward began, `b_i` being its `backward_seconds`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_mgwfbp.plan.records import (
    FORMAT,
    Saved,
    dump,
    located,
    parse,
    pick,
    require_count,
    require_distinct,
    require_list,
    require_number,
    require_same_parameters,
    require_text,
    shown,
)

__all__ = ["FORMAT", "ITEMSIZE", "LayerProfile", "ModelProfile", "Span"]

# Bytes per element, by torch's dtype names.
ITEMSIZE = {
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "bool", "int8", "uint8"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "complex32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "complex64", "int64", "uint64"), 8),
    "complex128": 16,
}
_REQUIRED = ("name", "numel", "dtype", "backward_seconds")
_OPTIONAL = ("shape", "forward_seconds", "forward_index")


@dataclass(frozen=True)
class Span:
    """What ran when: seconds since backward began; `index` counts among spans of the same kind."""

    what: str
    index: int
    begin_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class LayerProfile:
    """One parameter: its size, and the seconds of backward between the gradient before and it."""

    name: str
    numel: int
    dtype: str
    backward_seconds: float
    shape: tuple[int, ...] | None = None
    forward_seconds: float | None = None
    forward_index: int | None = None

    def __post_init__(self) -> None:
        require_text("name", self.name)
        require_count("numel", self.numel)
        require_text("dtype", self.dtype)
        if self.dtype not in ITEMSIZE:
            raise ValueError(
                f"dtype must be torch's name of a dtype, such as float32, got {self.dtype!r}"
            )
        require_number("backward_seconds", self.backward_seconds)
        if self.shape is not None:
            require_list("shape", self.shape)
            for extent in self.shape:
                require_count("shape", extent)
            if math.prod(self.shape) != self.numel:
                got = shown(list(self.shape))
                raise ValueError(f"shape must be of numel, {self.numel} elements, got {got}")
            object.__setattr__(self, "shape", tuple(self.shape))
        if self.forward_seconds is not None:
            require_number("forward_seconds", self.forward_seconds)
        if self.forward_index is not None:
            require_count("forward_index", self.forward_index)

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient in its own dtype."""
        return self.numel * ITEMSIZE[self.dtype]

    def to_fields(self) -> dict[str, Any]:
        """The JSON object; what was not measured is left out."""
        fields = {key: getattr(self, key) for key in (*_REQUIRED, *_OPTIONAL)}
        return {key: value for key, value in fields.items() if value is not None}


@dataclass(frozen=True)
class ModelProfile(Saved):
    """A model's parameters in the order in which backward produces their gradients."""

    model: str
    layers: tuple[LayerProfile, ...]
    forward_seconds: float
    note: str = ""

    def __post_init__(self) -> None:
        require_text("model", self.model)
        require_text("note", self.note)
        require_number("forward_seconds", self.forward_seconds)
        require_distinct("layers", self.names)
        require_count("numel of all layers", sum(layer.numel for layer in self.layers))

    @property
    def names(self) -> tuple[str, ...]:
        """Parameter names in backward order."""
        return tuple(layer.name for layer in self.layers)

    @property
    def ready_seconds(self) -> NDArray[np.float64]:
        """When each gradient exists, since backward began."""  # (layers,)
        return np.cumsum([layer.backward_seconds for layer in self.layers], dtype=np.float64)

    @property
    def nbytes(self) -> NDArray[np.int64]:
        """Bytes of each gradient in its own dtype."""  # (layers,)
        return np.array([layer.nbytes for layer in self.layers], dtype=np.int64)

    @property
    def backward_seconds(self) -> float:
        """All of backward: when the last gradient exists."""
        return float(self.ready_seconds[-1])

    def check_names(self, names: Sequence[str]) -> None:
        """ValueError naming the first parameter that only one of the profile and `names` has."""
        require_same_parameters("profile", self.names, names)

    def check_numels(self, numels: Mapping[str, int]) -> None:
        """ValueError naming the first parameter that has another size than `numels` says.

        One whose gradients are sparse has none in a profile that was measured.
        """
        for layer in self.layers:
            if layer.numel not in (0, numels[layer.name]):
                raise ValueError(
                    f"the profile has {layer.numel} elements of {layer.name!r}, the model"
                    f" {numels[layer.name]}; it was made for another model: leave it out, or give"
                    " the profile of this model"
                )

    def scaled(self, seconds_factor: float) -> "ModelProfile":
        """The same model on a machine that takes `seconds_factor` times as long."""
        require_number("seconds_factor", seconds_factor, "times")
        layers = tuple(
            replace(
                layer,
                backward_seconds=layer.backward_seconds * seconds_factor,
                forward_seconds=None
                if layer.forward_seconds is None
                else layer.forward_seconds * seconds_factor,
            )
            for layer in self.layers
        )
        return replace(self, layers=layers, forward_seconds=self.forward_seconds * seconds_factor)

    def to_json(self) -> str:
        return dump(
            model=self.model,
            note=self.note,
            forward_seconds=self.forward_seconds,
            layers=[layer.to_fields() for layer in self.layers],
        )

    @classmethod
    def from_json(cls, text: str, source: str) -> "ModelProfile":
        with located(source):
            fields = parse(text, ("model", "note", "forward_seconds", "layers"))
            require_list("layers", fields["layers"])
            layers = []
            for index, entry in enumerate(fields.pop("layers")):
                with located(f"layers[{index}]"):
                    layers.append(LayerProfile(**pick(entry, _REQUIRED, _OPTIONAL)))
            return cls(layers=tuple(layers), **fields)

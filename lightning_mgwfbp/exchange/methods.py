"""What a user may choose as `compressor=`, and the exchanger that carries it out."""

from __future__ import annotations

from lightning_mgwfbp.exchange.comm_hook import CommHookExchanger, DDPCommHook
from lightning_mgwfbp.exchange.compressed import CompressedExchanger
from lightning_mgwfbp.exchange.compressors import COMPRESSORS, Cast, Compressor
from lightning_mgwfbp.exchange.exchangers import DenseExchanger, Exchanger
from lightning_mgwfbp.exchange.power_sgd import PowerSGD, PowerSGDExchanger
from lightning_mgwfbp.exchange.transport import Transport

ExchangeMethod = Compressor | PowerSGD | DDPCommHook


def resolve_compressor(compressor: str | ExchangeMethod | None) -> ExchangeMethod | None:
    """Return the method that a user's `compressor=` means.

    Raises:
        ValueError: neither None, a name of `COMPRESSORS` nor a method.
    """
    if compressor is None or isinstance(compressor, ExchangeMethod):
        return compressor
    if isinstance(compressor, str) and compressor in COMPRESSORS:
        return COMPRESSORS[compressor]
    raise ValueError(
        f"`compressor=...` must be None, one of {sorted(COMPRESSORS)}, a Compressor, PowerSGD or"
        f" DDPCommHook, got {compressor!r}."
    )


def kind_of(method: ExchangeMethod | None) -> str:
    """What plans say that they were made for; densities and the like do not matter."""
    return "no compressor" if method is None else type(method).__name__


def make_exchanger(method: ExchangeMethod | None, transport: Transport) -> Exchanger:
    """Return what exchanges buckets by `method` over `transport`."""
    match method:
        case None | Cast():
            return DenseExchanger(transport, method)
        case PowerSGD():
            return PowerSGDExchanger(transport, method)
        case DDPCommHook():
            return CommHookExchanger(transport, method)
        case Compressor():
            return CompressedExchanger(transport, method)

"""What compressing costs on one core: `python benchmarks/selection.py` (half a minute).

First `sampled_top_k` against `torch.topk(buffer.abs(), k)`, on data that a sampled threshold might
be misled by; both find k elements, and "captured" is how much of the best sum of magnitudes, or of
squares where that is less, the sampled ones have. Then every compressor's `encode` and `decode`.

Target: at 10 M elements, densities 0.001 and 0.01, at least five times as fast, at least 95 %
captured. Contenders take turns; ratios are medians of those of one turn.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import math
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_mgwfbp.exchange.compressors import Compressor, Moment, Quantize8, RandomK, TopK
from lightning_mgwfbp.exchange.compressors.selection import exact_top_k, sampled_top_k

NUMELS = (1_000_000, 10_000_000)
DENSITIES = (0.001, 0.01)
TURNS = 5


def normal(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


def every(stride: int, values: Tensor) -> Tensor:
    """Zeros but for one in `stride`."""
    return torch.where(torch.arange(len(values)) % stride == 0, values, 0.0)


def layers(count: int, values: Tensor) -> Tensor:
    """Parts of `values` in different decades, as the layers of a merge group may be."""
    scales = 10.0 ** torch.arange(count)
    return (values.view(count, -1) * scales.unsqueeze(1)).view(-1)


KINDS: dict[str, Callable[[int], Tensor]] = {
    "normal": normal,
    "cubed normal": lambda numel: normal(numel) ** 3,
    "layers, 8 decades": lambda numel: layers(8, normal(numel)),
    "1 of 30 not 0": lambda numel: every(30, normal(numel)),
    "1 of 3000 not 0": lambda numel: every(3000, normal(numel)),
    "equal": lambda numel: torch.full((numel,), 0.5),
    "period of 256": lambda numel: torch.sin(torch.arange(numel) * (math.pi / 128)),
    "sorted": lambda numel: normal(numel).sort().values,
}


def plain_top_k(buffer: Tensor, k: int) -> Tensor:
    return torch.topk(buffer.abs(), k).indices


def turns(*contenders: Callable[[], object]) -> list[list[float]]:
    """Milliseconds, [contender][turn], after one turn that is not counted."""
    milliseconds: list[list[float]] = [[] for _ in contenders]
    for turn in range(TURNS + 1):
        for contender, samples in zip(contenders, milliseconds, strict=True):
            begun = perf_counter()
            contender()
            if turn > 0:
                samples.append((perf_counter() - begun) * 1e3)
    return milliseconds


def captured(buffer: Tensor, k: int) -> float:
    """The sampled share of the best sum of magnitudes, or of squares where that is less."""
    sampled, best = (buffer[f(buffer, k)].abs().double() for f in (sampled_top_k, plain_top_k))
    return min(float((sampled**power).sum() / (best**power).sum()) for power in (1, 2))


def selections() -> Table:
    table = _selection_table("Selection")
    for numel in NUMELS:
        for kind, make in KINDS.items():
            buffer = make(numel)
            for density in DENSITIES:
                table.add_row(kind, *_figures(buffer, density, plain_top_k))
    return table


def crossover() -> Table:
    """Beside `exact_top_k`, the other choice, which leaves the k unsorted."""
    table = _selection_table("Where `selection='auto'` changes sides")
    for exponent in (15, 17, 19, 21):
        buffer = normal(2**exponent)
        for density in (0.001, 0.01, 0.1, 0.25):
            table.add_row("normal", *_figures(buffer, density, exact_top_k))
    return table


def _selection_table(title: str) -> Table:
    return _table(title, ("data", "numel", "density", "topk ms", "sampled ms", "ratio", "captured"))


def _figures(
    buffer: Tensor, density: float, other: Callable[[Tensor, int], Tensor]
) -> tuple[str, ...]:
    k = round(density * buffer.numel())
    plain, sampled = turns(lambda: other(buffer, k), lambda: sampled_top_k(buffer, k))
    return (
        _millions(buffer.numel()),
        f"{density:g}",
        f"{median(plain):.2f}",
        f"{median(sampled):.2f}",
        f"{median(p / s for p, s in zip(plain, sampled, strict=True)):.2f}",
        f"{captured(buffer, k):.1%}",
    )


def compressors() -> Table:
    rows: list[tuple[str, Compressor, float]] = [
        ("TopK, 0.001", TopK(), 0.001),
        ("TopK, 0.01", TopK(), 0.01),
        ("RandomK, 0.001", RandomK(0.001), 0.001),
        ("RandomK, 0.01", RandomK(0.01), 0.01),
        ("Quantize8", Quantize8(), 1.0),
    ]
    table = _table("Compressors, of normal data", ("compressor", "numel", "encode ms", "decode ms"))
    for numel in NUMELS:
        buffer, total = normal(numel), torch.zeros(numel)
        for name, compressor, density in rows:
            moment = Moment(density=density)
            wire = compressor.encode(buffer, moment)
            encode, decode = turns(
                lambda c=compressor, b=buffer, m=moment: c.encode(b, m),
                lambda c=compressor, w=wire, t=total, m=moment: c.decode(w, t, m, 0.5),
            )
            figures = (f"{median(samples):.2f}" for samples in (encode, decode))
            table.add_row(name, _millions(numel), *figures)
    return table


def _millions(numel: int) -> str:
    return f"{numel / 1e6:.3g} M"


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=f"{title}: medians of {TURNS} turns", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def main() -> None:
    torch.set_num_threads(1)
    console = Console()
    console.print(selections())
    console.print(crossover())
    console.print(compressors())


if __name__ == "__main__":
    main()

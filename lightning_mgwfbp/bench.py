"""Time all-reduces over this machine's or this job's link and fit alpha and beta to them.

Two local processes by default; under torchrun all ranks of the job:
    torchrun --nnodes 2 --nproc-per-node 1 ... $(which lightning-mgwfbp) bench --save link.json
The saved link is what the strategy takes as `link=`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import multiprocessing

from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.measure.collectives import time_all_reduce
from lightning_mgwfbp.plan import LinkFit, fit_alpha_beta

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_LOCAL_RANKS = 2


@dataclass(frozen=True)
class _Request:
    """What is to be timed, and how it is to be said."""

    backend: str
    dtype: str
    largest_nbytes: int
    seconds: float
    busy: bool
    save: str | None
    json: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lightning-mgwfbp bench`."""
    parser.add_argument(
        "--backend", choices=("gloo", "nccl", "mpi"), default="gloo", help="(default: gloo)"
    )
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="of the messages")
    parser.add_argument(
        "--largest-nbytes", type=int, default=32 * 2**20, help="the largest message (default: 32M)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds of timing: sizes that would take it beyond are given up (default: 5);"
        " starting the ranks comes on top, several seconds",
    )
    parser.add_argument(
        "--busy", action="store_true", help="keep a core of each rank computing meanwhile"
    )
    parser.add_argument("--save", metavar="LINK.json", help="write alpha and beta to this file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> None:
    """Time the link; rank 0 prints."""
    if arguments.largest_nbytes < 64 or not arguments.seconds > 0:
        raise ValueError("--largest-nbytes must be at least 64, and --seconds above 0")
    _require_backend(arguments.backend)
    if arguments.save and not os.access(folder := Path(arguments.save).absolute().parent, os.W_OK):
        raise ValueError(f"--save {arguments.save}: there is no folder {folder} to write to")
    request = _Request(**{f.name: getattr(arguments, f.name) for f in fields(_Request)})
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _measure(request)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(_measure_locally, (request, port), nprocs=_LOCAL_RANKS)


def _require_backend(backend: str) -> None:
    if backend == "nccl" and not torch.cuda.is_available():
        raise ValueError("--backend nccl needs a GPU, and there is none here: leave it out")
    if not dist.is_backend_available(backend):
        raise ValueError(f"--backend {backend}: this torch was built without it")


def _measure_locally(rank: int, request: _Request, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(_LOCAL_RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    _measure(request)


def _measure(request: _Request) -> None:
    device = torch.device("cpu")
    if request.backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group(request.backend)
    try:
        transport = TorchTransport()
        samples = time_all_reduce(
            transport,
            largest_nbytes=request.largest_nbytes,
            dtype=_DTYPES[request.dtype],
            device=device,
            budget_seconds=request.seconds,
            beside_computation=request.busy,
        )
        if transport.rank == 0:
            _report(fit_alpha_beta(samples), transport.world_size, request)
        transport.close()
    finally:
        dist.destroy_process_group()


def _report(fit: LinkFit, world_size: int, request: _Request) -> None:
    if request.save:
        fit.link.save(request.save)
    if request.json:
        result = {
            "world_size": world_size,
            "alpha": fit.link.alpha,
            "beta": fit.link.beta,
            "r_squared": fit.r_squared,
            "samples": fit.samples,
        }
        json.dump(result, sys.stdout)
        print()
        return
    table = Table(
        "bytes",
        "measured (us)",
        "fitted (us)",
        title=f"all-reduce of {request.dtype} over {world_size} ranks, {request.backend}",
        caption=f"{fit.link}; R^2 {fit.r_squared:.4f}",
    )
    for nbytes, seconds in fit.samples:
        fitted = float(fit.link(nbytes))
        table.add_row(f"{nbytes:,.0f}", f"{seconds * 1e6:,.1f}", f"{fitted * 1e6:,.1f}")
    Console().print(table)

"""Start Horovod in processes that something else has launched, as `horovodrun` would have.

Horovod's ranks meet at a small HTTP server that `horovodrun` runs and names in environment
variables. Here rank 0 runs it while all ranks start, and everything else that those variables say
follows from rank, world size and host names, which travel over a transport that exists already.

Facts about Horovod 0.28.1, found by running it:
- Ranks that cannot meet do not raise: its background thread ends the process. So what can be
  checked is checked before.
- It connects ranks by the address that each host's own name resolves to, whatever
  HOROVOD_GLOO_IFACE says, and under horovodrun too: where that is 127.0.1.1, one rank ends with
  "connection refused" and the others wait for ever.
- Where HOROVOD_FUSION_THRESHOLD and HOROVOD_CYCLE_TIME are both set, a second `hvd.init()` in one
  process is a segmentation fault; where it runs over MPI, MPI ends the process then.
"""

from __future__ import annotations

import importlib
import math
import os
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

from lightning_mgwfbp.exchange.horovod_hosts import (
    address_of,
    own_address,
    places,
    require_reachable,
)
from lightning_mgwfbp.exchange.transport import Transport

# Horovod must not merge again what the plan has separated: it would wait for the last of several
# groups before it sends the first. Its cycle stays as it is: [Note: cycles].
_FUSION = {"HOROVOD_FUSION_THRESHOLD": "0"}
_GLOO_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
_ANSWERS_WITHIN = timedelta(seconds=30)  # Horovod's own choice
_started_here = threading.Event()  # set while Horovod runs as this file has started it


def load_horovod() -> Any:
    """Return the module `horovod.torch`.

    Raises:
        ModuleNotFoundError: it cannot be imported; names the script that installs it.
    """
    try:
        return importlib.import_module("horovod.torch")
    except ImportError as error:
        raise ModuleNotFoundError(
            f"Horovod cannot be imported ({error}). scripts/install_horovod.sh builds it for the"
            ' torch that is installed; or take `strategy="mgwfbp"`, or `transport="torch"`, which'
            " need no Horovod."
        ) from error


def is_launched() -> bool:
    """Whether horovodrun or mpirun has launched this process, so that Horovod knows its rank."""
    return "HOROVOD_RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ


def init_launched() -> Any:
    """Have Horovod run with the ranks that its launcher has made; return `horovod.torch`.

    Raises:
        ModuleNotFoundError: Horovod cannot be imported.
        RuntimeError: the launcher is mpirun, which Horovod was not built for; or this host's name
            leads nowhere.
    """
    hvd = load_horovod()
    if hvd.is_initialized():
        if not _started_here.is_set() and hvd.rank() == 0:
            _warn_of_fusion()
        return hvd
    if "HOROVOD_RANK" in os.environ:
        size, local_size = (os.environ.get(f"HOROVOD_{n}", "1") for n in ("SIZE", "LOCAL_SIZE"))
        own_address(alone=size == local_size)  # or say now that others do not find it
    elif not hvd.mpi_built():
        raise RuntimeError(
            "mpirun has launched this process, but Horovod was built without MPI, and would take"
            " each process for the only one. Build it with `HOROVOD_WITH_MPI=1"
            " scripts/install_horovod.sh --rebuild`, or launch with `horovodrun --gloo`."
        )
    _init(hvd, {})
    return hvd


def start_horovod(control: Transport, timeout: timedelta = _ANSWERS_WITHIN) -> bool:
    """Have Horovod run with the ranks of `control`, in all of its processes.

    Args:
        control: joins the processes before Horovod does; only used while it starts.
        timeout: of what is exchanged. Horovod's own threads, which always answer each other at
            once, take a rank for lost after that or after 30 s, whichever is sooner; without it
            even the end of a process would wait for a rank that is stopped.

    Returns:
        Whether this call started it; False if it ran already, for its user to stop.

    Raises:
        ModuleNotFoundError: Horovod cannot be imported.
        RuntimeError: a host's name leads nowhere, or Horovod runs with other ranks, or cannot
            run under the launcher.
    """
    hvd = load_horovod()
    starts = not hvd.is_initialized()
    if starts and is_launched():
        init_launched()
    elif starts:
        _meet_and_init(hvd, control, min(timeout, _ANSWERS_WITHIN))
    theirs = control.all_gather_object((hvd.rank(), hvd.size()), key="Horovod's ranks")
    ours = [(rank, control.world_size) for rank in range(control.world_size)]
    if theirs != ours:
        raise RuntimeError(
            f"Horovod counts its processes otherwise than torch.distributed: (rank, size) is"
            f" {theirs}, not {ours}. Start all processes with one launcher, and leave out"
            " `hvd.init()` or call it in all of them."
        )
    return starts


def stop_horovod() -> None:
    """Stop Horovod in this process, so that it can be started again.

    A Horovod that was given a cycle time, or runs over MPI, is left running until the process ends:
    it could not be started again, and whoever wants to start it finds it running.
    """
    hvd = load_horovod()
    if "HOROVOD_CYCLE_TIME" not in os.environ and not hvd.mpi_enabled():
        hvd.shutdown()
        _started_here.clear()


def _init(hvd: Any, variables: Mapping[str, str]) -> None:
    """Initialise Horovod; it reads environment variables then, and only then."""
    with _environment({k: v for k, v in _FUSION.items() if k not in os.environ} | dict(variables)):
        hvd.init()
    _started_here.set()


@cache  # once per process
def _warn_of_fusion() -> None:
    if os.environ.get("HOROVOD_FUSION_THRESHOLD") != "0":
        warnings.warn(
            "`hvd.init()` has started Horovod with its own fusion, which merges again what the plan"
            " has separated. Leave `hvd.init()` out, or set HOROVOD_FUSION_THRESHOLD=0 before it.",
            stacklevel=2,
        )


def _meet_and_init(hvd: Any, control: Transport, timeout: timedelta) -> None:
    host = socket.gethostname()
    found = control.all_gather_object((host, address_of(host)), key="Horovod's hosts")
    hosts = [name for name, _ in found]
    require_reachable(dict(found))
    place = places(hosts)[control.rank]
    with _server(control, "127.0.0.1" if len(set(hosts)) == 1 else str(found[0][1])) as address:
        variables = {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address[0],
            "HOROVOD_GLOO_RENDEZVOUS_PORT": address[1],
            "HOROVOD_HOSTNAME": host,
            "HOROVOD_RANK": control.rank,
            "HOROVOD_SIZE": control.world_size,
            "HOROVOD_LOCAL_RANK": place.local_rank,
            "HOROVOD_LOCAL_SIZE": place.local_size,
            "HOROVOD_CROSS_RANK": place.cross_rank,
            "HOROVOD_CROSS_SIZE": place.cross_size,
        }
        if _GLOO_TIMEOUT not in os.environ:
            variables[_GLOO_TIMEOUT] = math.ceil(timeout.total_seconds())
        _init(hvd, {name: str(value) for name, value in variables.items()})
        control.barrier(key="Horovod has started")  # nobody needs the server any more


@contextmanager
def _server(control: Transport, address: str) -> Iterator[tuple[str, int]]:
    """Have rank 0 run the server where Horovod's ranks meet; yields where it is."""
    if control.rank != 0:
        yield control.broadcast_object(("", 0), 0, key="Horovod's server")
        return
    http = importlib.import_module("horovod.runner.http.http_server")
    server = http.RendezvousHTTPServer((address, 0), http.RendezvousHandler, False)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield control.broadcast_object(server.server_address, 0, key="Horovod's server")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and set them back: a process that is launched later from here is
    none of these ranks."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

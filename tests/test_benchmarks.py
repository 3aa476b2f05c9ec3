"""The benchmark harness: replayed models, the table's figures, and hosts out of namespaces."""

import statistics
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import models, netlab
from benchmarks.processes import run_on_loopback
from benchmarks.replay import Replay, Sleeper
from benchmarks.summary import summarise
from lightning_mgwfbp.plan import LayerProfile, ModelProfile

SHOW_RANK = [sys.executable, "-c", "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])"]


def profile_of(*layers: tuple[int, str, float], forward_seconds: float = 0.0) -> ModelProfile:
    return ModelProfile(
        "test",
        tuple(LayerProfile(f"layer{i}", *layer) for i, layer in enumerate(layers)),
        forward_seconds,
    )


def median_step_seconds(profile: ModelProfile) -> float:
    replay = Replay(profile)
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        replay(torch.zeros(())).backward()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def test_replay_yields_the_profiled_gradients() -> None:
    """Localises: the replay's gradients do not come in the profile's order, sizes and dtypes."""
    profile = profile_of((3, "float32", 0.0), (1, "bfloat16", 0.0), (70_000, "float64", 0.0))
    replay = Replay(profile)
    arrived: list[tuple[int, str]] = []
    for parameter in replay.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: arrived.append((p.grad.numel(), str(p.grad.dtype).removeprefix("torch.")))
        )
    replay(torch.zeros(())).backward()
    assert arrived == [(layer.numel, layer.dtype) for layer in profile.layers]


def test_replay_leaves_held_gradients_alone() -> None:
    """Localises: the replay yields the same memory twice, so that a kept gradient changes."""
    replay = Replay(profile_of((8, "float32", 0.0)))
    (weight,) = replay.parameters()
    replay(torch.zeros(())).backward()
    held, expected = weight.grad, weight.detach().clone()
    assert held is not None
    with torch.no_grad():
        weight.add_(1)
    weight.grad = None
    replay(torch.zeros(())).backward()
    assert torch.equal(held, expected)
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected + 1)


def test_longer_profile_takes_longer() -> None:
    """Localises: the replay does not sleep for the profiled times."""
    short = profile_of(*[(1, "float32", 2e-4)] * 100, forward_seconds=0.02)
    long = short.scaled(10.0)
    # A sleep may end late, as the machine pleases, but never early.
    assert long.forward_seconds + long.backward_seconds <= median_step_seconds(long)
    assert median_step_seconds(short) < median_step_seconds(long)


def test_late_sleeps_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Localises: many short layers take longer than they should, as every sleep ends late."""
    now = 0.0

    def late_sleep(seconds: float) -> None:
        nonlocal now
        now += seconds + 1e-4

    monkeypatch.setattr("benchmarks.replay.time.sleep", late_sleep)
    monkeypatch.setattr("benchmarks.replay.time.perf_counter", lambda: now)
    sleeper = Sleeper()
    for _ in range(1000):
        with sleeper.lasting(2e-5):
            pass
    assert 1000 * 2e-5 <= now <= 1000 * 2e-5 + 1e-4
    before = now
    now += 1.0  # a stall, of which only what Python may take is made up for
    with sleeper.lasting(0.5):
        pass
    assert 1.5 - 2e-4 <= now - before <= 1.5 + 1e-4


def test_models_have_the_sizes_they_claim() -> None:
    """Localises: models.py builds something else than its docstrings and README.md say."""
    sizes = {}
    for name in ("conv", "gpt", "narrow", "replay:resnet50@0.01"):
        parameters = list(models.builder(name)().module.parameters())
        sizes[name] = len(parameters), round(sum(p.numel() for p in parameters) / 1e6, 1)
    assert sizes["narrow"] == (1000, 2.1)
    assert sizes["conv"][1] == 11.2
    assert sizes["gpt"][1] == 10.8
    assert sizes["replay:resnet50@0.01"] == (161, 25.6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet", "`--models` takes conv, gpt, narrow or replay:"),
        ("replay:", "`--models` takes conv, gpt, narrow or replay:"),
        ("replay:resnet50@fast", "needs a number as SCALE, got 'fast'"),
        ("replay:resnet50@-1", "seconds_factor"),
    ],
)
def test_unknown_model_is_refused(name: str, message: str) -> None:
    """Localises: a mistyped model is found only after minutes, on a rank."""
    with pytest.raises(ValueError, match=message):
        models.builder(name)


def test_summary_pairs_rounds() -> None:
    """Localises: medians, spread or paired ratios, on numbers worked out by hand.

    The machine is twice as slow in the second round: ratios of overall medians would see it, ratios
    paired by round do not.
    """
    blocks = {
        "compute": [[1.0, 1.0, 9.0], [2.0, 2.0, 2.0], [1.0, 1.0, 1.0]],
        "ddp": [[2.0, 2.0, 2.0], [4.0, 4.0, 4.0], [2.0, 2.0, 2.0]],
        "optimal": [[1.5, 1.5, 1.5], [3.0, 3.0, 3.0], [1.0, 1.0, 1.0]],
    }
    figures = summarise(blocks)
    assert figures["ddp"].median_seconds == 2.0
    assert figures["ddp"].spread_seconds == 2.0  # quartiles of 2 2 2 2 2 2 4 4 4: 2 and 4
    assert figures["ddp"].ratio_to_ddp == 1.0
    assert figures["ddp"].ratio_to_compute == 2.0
    assert figures["optimal"].ratio_to_ddp == 0.75  # of 0.75, 0.75, 0.5
    assert figures["optimal"].ratio_to_compute == 1.5  # of 1.5, 1.5, 1
    alone = summarise({"optimal": blocks["optimal"]})["optimal"]
    assert (alone.ratio_to_ddp, alone.ratio_to_compute) == (None, None)


def test_failing_rank_ends_the_others() -> None:
    """Localises: a failed rank leaves the others running, or its failure is lost."""
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 of 2 ended with exit code 3"):
        run_on_loopback([["sleep", "600"], ["sh", "-c", "exit 3"]])
    with pytest.raises(RuntimeError, match=r"ranks \[0\] still ran after 0.2 s"):
        run_on_loopback([["sleep", "600"], ["true"]], timeout=0.2)
    assert time.monotonic() - begun < 300


@pytest.mark.parametrize("rate", ["fast", "1gbit burst 1kb", "none", ""])
def test_malformed_rate_is_refused(rate: str) -> None:
    """Localises: what reaches the `tc` command line."""
    with pytest.raises(ValueError, match="`rate` must be like '1gbit'"):
        netlab.Lab(rate=rate)


@pytest.fixture
def needs_namespaces() -> None:
    if reason := netlab.unavailable():
        pytest.skip(reason)


def namespaces() -> set[str]:
    return {path.name for path in Path("/run/netns").glob("*")}


@pytest.mark.usefixtures("needs_namespaces")
def test_lab_runs_ranks_and_leaves_nothing() -> None:
    """Localises: hosts that cannot reach each other, two labs in each other's way, or leftovers."""
    listen = "import socket; socket.create_server(('', 9)).accept()"
    connect = """
import socket, time
for _ in range(100):
    try:
        socket.create_connection(("10.77.0.1", 9), timeout=1)
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
"""
    exchange = [[sys.executable, "-c", listen], [sys.executable, "-c", connect]]
    with netlab.Lab(2, "100mbit") as lab, netlab.Lab(2) as other:
        assert lab.run([SHOW_RANK] * 2) == ["0 2\n", "1 2\n"]
        assert other.run([["hostname"]] * 2) == [f"{host}\n" for host in other.hosts]
        lab.rate(None)
        lab.run(exchange, timeout=60)
        lab.cut(1)
        with pytest.raises(RuntimeError, match="rank 1 of 2 ended"):
            lab.run(exchange, timeout=60)
        lab.mend(1)
        lab.run(exchange, timeout=60)
        with pytest.raises(ValueError, match="takes one per host"):
            lab.run([SHOW_RANK])
    assert not namespaces() & {*lab.hosts, *other.hosts}
    assert not any(Path("/etc/netns", host).exists() for host in (*lab.hosts, *other.hosts))


@pytest.mark.usefixtures("needs_namespaces")
def test_lab_is_torn_down_after_an_interrupt() -> None:
    """Localises: Ctrl-C within a lab leaves its namespaces behind."""
    lab = netlab.Lab(2)

    def interrupted() -> None:
        with lab:
            assert set(lab.hosts) <= namespaces()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not namespaces() & set(lab.hosts)

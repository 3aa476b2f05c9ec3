"""One rank of a benchmark: all contenders alive on one model, taking turns in blocks of steps.

    torchrun --nproc-per-node 2 -m benchmarks.worker --model conv --contenders ddp,optimal \\
        --steps 10 --rounds 3 --out blocks.json

Started by benchmarks/run.py. Rank 0 writes, for each contender, the seconds of its steps and the
number of merge groups, and the ranks' peak resident memory.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import models
from benchmarks.contenders import CONTENDERS, Stepper

# Covers the merged contenders' own warm-up, after which their plan is made and the link measured.
WARMUP_STEPS = 10
# The first steps of a block find caches and memory as the contender before left them.
SETTLING_STEPS = 2


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        result = measure(
            arguments.model, arguments.contenders.split(","), arguments.steps, arguments.rounds
        )
        if dist.get_rank() == 0:
            arguments.out.write_text(json.dumps(result))
    finally:
        dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--contenders", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def measure(model: str, names: list[str], steps: int, rounds: int) -> dict[str, object]:
    """Run the contenders in turn, A B A B ..., and return what rank 0 writes."""
    build = models.builder(model)
    steppers = {}
    for name in names:
        # The same weights on all ranks and for all contenders, hence nothing to broadcast.
        torch.manual_seed(0)
        workload = build()
        with CONTENDERS[name].running():
            steppers[name] = CONTENDERS[name].build(workload.module)
            run_block(steppers[name], workload.inputs, WARMUP_STEPS)
    inputs = workload.inputs

    seconds = torch.empty(rounds, len(names), steps, dtype=torch.float64)
    for i in range(rounds):
        for j, (name, stepper) in enumerate(steppers.items()):
            with CONTENDERS[name].running():
                run_block(stepper, inputs, SETTLING_STEPS)
                seconds[i, j] = torch.tensor(run_block(stepper, inputs, steps))
    # A step took what it took the slowest rank, and a job needs what its largest rank needs.
    peak_rss = torch.tensor(peak_rss_bytes())
    for measured in (seconds, peak_rss):
        dist.all_reduce(measured, dist.ReduceOp.MAX)
    return {
        "blocks": {name: seconds[:, j].tolist() for j, name in enumerate(names)},
        "merge_groups": {name: stepper.merge_groups() for name, stepper in steppers.items()},
        "peak_rss_bytes": peak_rss.item(),
    }


def run_block(stepper: Stepper, inputs: tuple[Tensor, ...], steps: int) -> list[float]:
    """Seconds that each of `steps` training steps took this rank; all ranks begin together."""
    dist.barrier()
    seconds = []
    for _ in range(steps):
        begun = time.perf_counter()
        stepper.step(inputs)
        seconds.append(time.perf_counter() - begun)
    begun = time.perf_counter()
    stepper.settle()
    seconds[-1] += time.perf_counter() - begun
    return seconds


def peak_rss_bytes() -> int:
    """The most memory that this process ever held, from the kernel's own account (`VmHWM`)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line: peak memory needs Linux.")


if __name__ == "__main__":
    main()

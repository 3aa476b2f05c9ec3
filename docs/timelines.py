"""Draw docs/timelines.png: when gradients are made and when they are sent, under two plans.

python docs/timelines.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from lightning_mgwfbp.plan import AlphaBeta, DenseCost, ModelProfile, Optimal, Threshold, simulate

ROOT = Path(__file__).parent.parent
LINK = AlphaBeta(alpha=3e-4, beta=8.4e-9)  # gloo over 1 Gbit/s Ethernet


def main() -> None:
    profile = ModelProfile.load(ROOT / "tests" / "data" / "profiles" / "resnet50.json")
    profile = profile.scaled(0.6)  # communication and backward of one size
    cost = DenseCost(LINK)
    figure, axes = plt.subplots(2, 1, figsize=(9, 3.2), sharex=True, layout="constrained")
    rows = (("DDP's 25 MiB groups", Threshold()), ("planned merge groups", Optimal()))
    for axis, (title, planner) in zip(axes, rows, strict=True):
        timeline = simulate(profile, planner.plan(profile, cost), cost)
        backward = timeline.backward_seconds * 1e3
        axis.barh(1, backward, color="#4c78a8", height=0.7)
        for span in timeline.spans:
            width = (span.end_seconds - span.begin_seconds) * 1e3
            axis.barh(
                0,
                width,
                left=span.begin_seconds * 1e3,
                color="#f58518",
                edgecolor="white",
                height=0.7,
            )
        axis.axvline(backward, color="black", linewidth=0.8, linestyle=":")
        exposed = timeline.exposed_seconds * 1e3
        axis.set_yticks([0, 1], ["network", "backward"])
        axis.set_title(f"{title}: {exposed:.0f} ms of waiting after backward", loc="left", size=10)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[-1].set_xlabel("ms since backward began (ResNet-50, 1 Gbit/s, predicted)")
    figure.savefig(ROOT / "docs" / "timelines.png", dpi=120)


if __name__ == "__main__":
    main()

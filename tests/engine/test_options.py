"""A failure here is an option that is accepted though it cannot work, or that means another."""

from pathlib import Path
from typing import Any

import pytest
from loopback import on_ranks

from lightning_mgwfbp.engine.options import Options, Settings
from lightning_mgwfbp.exchange.compressors import Cast
from lightning_mgwfbp.exchange.transport import LoopbackTransport
from lightning_mgwfbp.plan import WFBP, AlphaBeta, LayerProfile, MergePlan, ModelProfile, Optimal

PROFILE = ModelProfile("model", (LayerProfile("weight", 3, "float32", 0.5),), 0.25)
PLAN = MergePlan(("weight",), ((0, 1),))
LINK = AlphaBeta(1e-3, 1e-9)

BAD: list[tuple[dict[str, Any], str]] = [
    ({"planner": "best"}, r"planner.*auto.*optimal.*'best'"),
    ({"planner": 3}, r"planner.*3"),
    ({"planner": None}, r"planner.*None"),
    ({"compressor": "fp8"}, r"`compressor=.*bf16.*'fp8'"),
    ({"warmup_steps": 0}, r"`warmup_steps=.*at least 1, got 0"),
    ({"warmup_steps": -2}, r"`warmup_steps=.*got -2"),
    ({"warmup_steps": 2.5}, r"`warmup_steps=.*got 2.5"),
    ({"warmup_steps": True}, r"`warmup_steps=.*got True"),
    ({"warmup_steps": None}, r"`warmup_steps=.*got None"),
    ({"replan_every_n_steps": 0}, r"`replan_every_n_steps=.*got 0"),
    ({"replan_every_n_steps": "10"}, r"`replan_every_n_steps=.*got '10'"),
    ({"detect_divergence_every_n_steps": 0}, r"`detect_divergence_every_n_steps=.*got 0"),
    ({"detect_divergence_every_n_steps": 1.5}, r"`detect_divergence_every_n_steps=.*got 1.5"),
    ({"profile": 3}, r"`profile=.*ModelProfile or the path.*got 3"),
    ({"profile": LINK}, r"`profile=.*ModelProfile.*AlphaBeta"),
    ({"link": (1e-3, 1e-9)}, r"`link=.*AlphaBeta or the path"),
    ({"static_graph": 3}, r"`static_graph=.*True or False, got 3"),
    ({"static_graph": None}, r"`static_graph=.*got None"),
    ({"replan_every_n_steps": 9, "profile": PROFILE}, r"`replan_every_n_steps=.*`profile="),
    ({"replan_every_n_steps": 9, "planner": PLAN}, r"`replan_every_n_steps=.*`planner="),
    ({"replan_every_n_steps": 9, "planner": "plan.json"}, r"`replan_every_n_steps=.*`planner="),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[str(a) for a, _ in BAD])
def test_bad_values(arguments: dict[str, Any], message: str) -> None:
    """One clear ValueError before training starts, naming the argument and what was got."""
    with pytest.raises(ValueError, match=message):
        Options(**arguments)


def test_names_are_resolved() -> None:
    """A name means another planner or compressor."""
    settings = Options(compressor="bf16", warmup_steps=2, link=LINK, static_graph=True).settle(
        LoopbackTransport.solo()
    )
    assert settings == Settings(
        Optimal(), Cast("bfloat16"), 2, None, None, None, LINK, True, "backward"
    )
    assert Options("wfbp").settle(LoopbackTransport.solo()).planner == WFBP()
    assert Options(PLAN).settle(LoopbackTransport.solo()).planner is PLAN


def test_files_are_read_on_rank_0_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank reads: on several nodes the file may lie on the first one only."""
    for name, record in {"plan": PLAN, "profile": PROFILE, "link": LINK}.items():
        record.save(tmp_path / f"{name}.json")
    readers: list[str] = []
    for kind in (MergePlan, ModelProfile, AlphaBeta):
        load = kind.load
        monkeypatch.setattr(
            kind, "load", lambda path, load=load: readers.append(path) or load(path)
        )
    plan, profile, link = (str(tmp_path / f"{n}.json") for n in ("plan", "profile", "link"))
    options = Options(planner=plan, profile=profile, link=link)
    for settings in on_ranks(options.settle, world_size=3):
        assert (settings.planner, settings.profile, settings.link) == (PLAN, PROFILE, LINK)
    assert sorted(readers) == sorted([plan, profile, link])


CONTENTS = {"missing": None, "empty": "", "foreign": PLAN.to_json(), "list": "[1]"}


@pytest.mark.parametrize("argument", ["profile", "link"])
@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_a_bad_file_is_every_ranks_error(
    argument: str, content: str | None, tmp_path: Path
) -> None:
    """Rank 0 raises and the others hang, or the message does not name argument and file."""
    path = tmp_path / "given.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")

    def settle(transport: LoopbackTransport) -> str:
        with pytest.raises(ValueError, match=f"`{argument}=") as error:
            Options(**{argument: str(path)}).settle(transport)  # type: ignore[arg-type]
        return str(error.value)

    texts = on_ranks(settle)
    assert texts[0] == texts[1]
    assert str(path) in texts[0]


def test_a_bad_plan_file() -> None:
    """The same for a saved plan."""
    with pytest.raises(ValueError, match=r"`planner=.*nowhere\.json"):
        Options(planner="nowhere.json").settle(LoopbackTransport.solo())


def test_facts_tell_options_apart() -> None:
    """Ranks with different options train on."""
    usual = Options().facts()
    assert usual == Options().facts()
    for other in ({"planner": "wfbp"}, {"compressor": "fp16"}, {"link": LINK}, {"profile": "a"}):
        assert Options(**other).facts() != usual  # type: ignore[arg-type]
    assert Options(link=LINK).facts() == Options(link=AlphaBeta(1e-3, 1e-9)).facts()

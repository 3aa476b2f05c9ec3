"""A failure here is a profile that is read, written or checked wrongly."""

import json
from pathlib import Path

import pytest

from lightning_mgwfbp.plan import LayerProfile, ModelProfile

PROFILES = sorted(Path(__file__).parent.parent.glob("data/profiles/*.json"))
LAYERS = [
    {"name": "b", "numel": 3, "dtype": "bfloat16", "backward_seconds": 0.5, "shape": [3]},
    {"name": "a", "numel": 4, "dtype": "complex64", "backward_seconds": 0.25},
]
FIELDS = {"format": 1, "model": "m", "note": "n", "forward_seconds": 0.75, "layers": LAYERS}


def read(**changes: object) -> ModelProfile:
    return ModelProfile.from_json(json.dumps({**FIELDS, **changes}), "p.json")


def read_layer(**changes: object) -> ModelProfile:
    return read(layers=[LAYERS[0], {**LAYERS[1], **changes}])


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_real_profiles_come_back_as_they_were(path: Path, tmp_path: Path) -> None:
    """Reading or writing changes what the files hold."""
    profile = ModelProfile.load(path)
    assert json.loads(profile.to_json()) == json.loads(path.read_text())
    profile.save(tmp_path / "again.json")
    assert ModelProfile.load(tmp_path / "again.json") == profile
    assert [file.name for file in tmp_path.iterdir()] == ["again.json"]


def test_values() -> None:
    """Order, bytes or cumulative times do not follow from the layers."""
    profile = read()
    assert profile.names == ("b", "a")
    assert profile.nbytes.tolist() == [6, 32]
    assert profile.ready_seconds.tolist() == [0.5, 0.75]
    assert profile.backward_seconds == 0.75
    assert profile.layers[0] == LayerProfile("b", 3, "bfloat16", 0.5, shape=(3,))
    assert json.loads(profile.to_json()) == FIELDS


def test_scaled() -> None:
    """A time is left unscaled, or something else is scaled."""
    layer = LayerProfile("a", 4, "float32", 0.5, forward_seconds=0.25, forward_index=2)
    scaled = ModelProfile("m", (layer,), 1.0).scaled(2)
    assert scaled.layers == (LayerProfile("a", 4, "float32", 1.0, None, 0.5, 2),)
    assert scaled.forward_seconds == 2.0


def test_unknown_keys_are_for_later_versions() -> None:
    """A file with additions is refused."""
    assert read(host="x") == read_layer(device="cpu") == read()


@pytest.mark.parametrize("text", ["", "{", "[]", "1" * 5000, "[" * 100_000, "\u00e9"])
def test_no_profile(text: str) -> None:
    """Text that is no JSON object leads to something else than a ValueError that names the file."""
    with pytest.raises(ValueError, match=r"^p\.json: "):
        ModelProfile.from_json(text, "p.json")


@pytest.mark.parametrize("field", ["format", "model", "note", "forward_seconds", "layers"])
def test_missing_field(field: str) -> None:
    """A key that is not there is not named."""
    fields = {key: value for key, value in FIELDS.items() if key != field}
    with pytest.raises(ValueError, match=rf"^p\.json: lacks the key '{field}'"):
        ModelProfile.from_json(json.dumps(fields), "p.json")


@pytest.mark.parametrize("field", ["name", "numel", "dtype", "backward_seconds"])
def test_missing_layer_field(field: str) -> None:
    """A layer's key that is not there is not named with its layer."""
    layer = {key: value for key, value in LAYERS[1].items() if key != field}
    with pytest.raises(ValueError, match=rf"^p\.json: layers\[1\]: lacks the key '{field}'"):
        read(layers=[LAYERS[0], layer])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", 2),
        ("format", True),
        ("model", 5),
        ("note", None),
        ("forward_seconds", -1),
        ("forward_seconds", True),
        ("layers", {}),
        ("layers", []),
        ("layers", [LAYERS[0], LAYERS[0]]),
    ],
)
def test_wrong_field(field: str, value: object) -> None:
    """A wrong value is accepted, or the error does not name file and field."""
    with pytest.raises(ValueError, match=rf"^p\.json: '?{field}'? must"):
        read(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("backward_seconds", value) for value in (-1e-9, float("nan"), float("inf"), True, "1")),
        *(("numel", value) for value in (-1, 1.0, True, "4", None)),
        *(("dtype", value) for value in ("float31", "torch.float32", 32, None)),
        ("name", 3),
        ("shape", 4),
        ("shape", [2, -1]),
        ("forward_seconds", float("nan")),
        ("forward_index", 1.5),
    ],
)
def test_wrong_layer_field(field: str, value: object) -> None:
    """A layer's wrong value is accepted, or the error does not name file, layer and field."""
    with pytest.raises(ValueError, match=rf"^p\.json: layers\[1\]: {field} must .* got "):
        read_layer(**{field: value})


def test_file_that_is_no_text(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 lead to an error that does not name the file."""
    path = tmp_path / "p.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"p\.json"):
        ModelProfile.load(path)


def test_check_names() -> None:
    """A profile of another model passes, or the error names no parameter."""
    profile = read()
    profile.check_names(["a", "b"])
    with pytest.raises(ValueError, match="the profile lacks the parameter 'c'"):
        profile.check_names(["a", "b", "c"])
    with pytest.raises(ValueError, match="the profile has a foreign parameter 'b'"):
        profile.check_names(["a"])

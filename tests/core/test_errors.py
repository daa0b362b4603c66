"""The form of our error messages."""

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from canonlm.core.errors import InvalidSetting, about, expected, refused, unknown, why


def test_unknown():
    error = unknown("task", "depoo", ["mano", "depo", "copying"])
    assert isinstance(error, ValueError)
    assert str(error) == 'unknown task "depoo". Did you mean "depo"? Tasks: copying, depo, mano.'
    assert str(unknown("task", "zzz", ["mano", "depo"])) == 'unknown task "zzz". Tasks: depo, mano.'
    assert str(unknown("task", "zzz", [])) == 'unknown task "zzz". Tasks: none.'
    assert str(unknown("difficulty", 7, ["easy"], "difficulties")) == 'unknown difficulty "7". Difficulties: easy.'


def test_unique_prefixes_of_names():
    difficulties = ["depo2-75", "depo1-225-k4", "depo1-225", "depo1-300"]
    assert 'Did you mean "depo1-225"?' in str(unknown("difficulty", "depo1", difficulties, "difficulties"))
    assert 'Did you mean "Llama-1B"?' in str(unknown("model", "llama", ["a-llama", "Llama-1B"]))
    assert "mean" not in str(unknown("model", "", ["a", "b"]))


def test_expected():
    error = expected("train.optim.lr", "a number > 0", "3e-3x")
    assert isinstance(error, ValueError)
    assert error.key == "train.optim.lr"
    assert str(error) == 'train.optim.lr: expected a number > 0, got "3e-3x"'
    assert str(expected("N", "an integer", 3.5)) == "N: expected an integer, got 3.5"
    assert str(expected("N", "an integer", None)) == "N: expected an integer, got None"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(13, "Permission denied", "run/.lock"), "run/.lock: Permission denied"),
        (OSError(28, "No space left on device"), "run: No space left on device"),
        (FileNotFoundError(2, "No such file or directory"), "the current folder: No such file or directory"),
        (OSError("a library's own"), "a library's own"),
    ],
)
def test_errors_of_the_system(error, message):
    assert about(error, "run") == message


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("depo.yml", "depo.yaml"),  # another spelling of the type
        ("dpo.yaml", "depo.yaml"),
        ("depo.cvs", "depo.csv"),
        ("dpo.py", None),  # another type
        ("zzz.yaml", None),
        ("gone/depo.yaml", None),  # its folder is not there either
    ],
)
def test_a_file_that_is_not_there_is_guessed_from_those_beside_it(tmp_path, name, guess):
    for there in ("depo.yaml", "depo.csv"):
        (tmp_path / there).touch()
    with pytest.raises(OSError) as caught:
        (tmp_path / name).stat()
    reason = "No such file or directory" + (f'; did you mean "{guess}"?' if guess else "")
    assert why(caught.value, tmp_path / name) == reason


def test_other_reasons_are_those_of_the_system(tmp_path):
    (tmp_path / "depo.yaml").touch()
    assert why(PermissionError(13, "Permission denied"), tmp_path / "dpo.yaml") == "Permission denied"
    assert why(ValueError("embedded null byte"), tmp_path / "dpo.yaml") == "embedded null byte"


class Wheel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    radius: float = Field(gt=0, le=2)
    spokes: int | None = Field(None, ge=3)
    kind: Literal["road", "track"] = "road"
    holes: list[int] | None = None
    span: tuple[float, float] = Field((0.0, 1.0), strict=False)
    gears: list[int | str] | None = None
    shares: list[Annotated[float, Field(ge=0, le=1)]] = []


class Cycle(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    front: Wheel = Wheel(radius=1)
    bell: bool = False
    more: dict[str, int] = {}

    @model_validator(mode="after")
    def _rings(self):
        if self.bell and self.name == "silent":
            raise expected("bell", "false", True)
        if self.name == "":
            raise ValueError("a cycle needs a name")
        return self


@pytest.mark.parametrize(
    ("values", "key", "message"),
    [
        ({"name": 3}, "name", "name: expected a string, got 3"),
        ({}, "name", "name: missing; expected a string"),
        ({"name": "x", "bell": "yes"}, "bell", 'bell: expected true or false, got "yes"'),
        ({"name": "x", "front": 5}, "front", "front: expected a group of settings, got 5"),
        ({"name": "x", "front": {}}, "front.radius", "front.radius: missing; expected a number > 0 and <= 2"),
        ({"name": "x", "front": {"radius": 3}}, "front.radius", "front.radius: expected a number > 0 and <= 2, got 3"),
        ({"name": "x", "front": {"radius": 1, "spokes": 2}}, "front.spokes",
         "front.spokes: expected an integer >= 3, got 2"),
        ({"name": "x", "front": {"radius": 1, "kind": "rod"}}, "front.kind",
         "front.kind: expected 'road' or 'track', got \"rod\""),
        ({"name": "x", "front": {"radius": 1, "holes": [1, "a"]}}, "front.holes",
         'front.holes: expected an integer, got "a"'),
        ({"name": "x", "front": {"radius": 1, "holes": 1}}, "front.holes", "front.holes: expected a list, got 1"),
        ({"name": "x", "front": {"radius": 1, "span": [0, "x"]}}, "front.span",
         'front.span: expected a number, got "x"'),
        ({"name": "x", "front": {"radius": 1, "gears": [1, 2.5]}}, "front.gears",
         "front.gears: expected an integer or a string, got 2.5"),
        ({"name": "x", "front": {"radius": 1, "shares": [1.5]}}, "front.shares",
         "front.shares: expected a number >= 0 and <= 1, got 1.5"),
        ({"name": "x", "front": {"radius": 1, "span": [1]}}, "front.span", "front.span: expected a list of 2, got [1]"),
        ({"name": "x", "front": {"radius": 1, "radus": 2}}, "front.radus",
         'unknown setting "front.radus". Did you mean "front.radius"? '
         "Settings: front.gears, front.holes, front.kind, front.radius, front.shares, front.span, front.spokes."),
        ({"name": "x", "front": {"radus": 1}}, "front.radus",
         'unknown setting "front.radus". Did you mean "front.radius"? '
         "Settings: front.gears, front.holes, front.kind, front.radius, front.shares, front.span, front.spokes."),
        ({"name": "x", "spokes": 3}, "spokes", 'unknown setting "spokes". Did you mean "front.spokes"? '
         "Settings: bell, front, more, name."),
        ({"name": "x", "frnt": {}}, "frnt", 'unknown setting "frnt". Did you mean "front"? '
         "Settings: bell, front, more, name."),
        ({"name": "x", "more": {"a": "b"}}, "more", 'more: expected an integer, got "b"'),
        ({"name": "x", "more": {1: 2}}, "more", "more: expected the name of a setting, got 1"),
        ({"name": "x", 1: 2}, "1", "1: expected the name of a setting, got 1"),
        ({"name": "silent", "bell": True}, "bell", "bell: expected false, got True"),
        ({"name": ""}, "", "a cycle needs a name"),
    ],
)  # fmt: skip
def test_refused(values, key, message):
    with pytest.raises(ValidationError) as caught:
        Cycle.model_validate(values)
    error = refused(caught.value, Cycle)
    assert isinstance(error, InvalidSetting)
    assert (error.key, str(error)) == (key, message)


def test_refused_with_a_prefix():
    with pytest.raises(ValidationError) as caught:
        Cycle.model_validate({"name": "x", "front": {"radius": 0}})
    error = refused(caught.value, Cycle, "shop.")
    assert (error.key, str(error)) == ("shop.front.radius", "shop.front.radius: expected a number > 0 and <= 2, got 0")

"""The pictures of the tasks are what the script draws today, and their shapes fit into the drawing."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from canonlm import tasks

IMAGES = Path(__file__).parents[1] / "docs" / "images"


@pytest.fixture(scope="module")
def drawings():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(IMAGES)
        import draw_tasks

        return draw_tasks.DRAWINGS


DRAWN = sorted(path.stem for path in (IMAGES / "tasks").iterdir())


def test_every_picture_is_of_a_task(drawings):
    assert sorted(drawings) == DRAWN
    assert {*DRAWN} <= {*tasks.names()}


@pytest.mark.parametrize("name", DRAWN)
def test_the_picture_is_what_the_script_draws(name, drawings):
    drawn = drawings[name]().svg()
    assert drawn == (IMAGES / "tasks" / f"{name}.svg").read_text("utf-8")
    svg = ElementTree.fromstring(drawn)
    assert svg.findtext("{*}title")
    width, height = float(svg.get("width")), float(svg.get("height"))
    for box in svg.iter("{http://www.w3.org/2000/svg}rect"):
        left, top = float(box.get("x")), float(box.get("y"))
        assert left >= 0
        assert left + float(box.get("width")) <= width
        assert top >= 0
        assert top + float(box.get("height")) <= height
    for point in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", " ".join(path.get("d") for path in svg.iterfind("{*}path"))):
        assert 0 <= float(point[0]) <= width
        assert 0 <= float(point[1]) <= height

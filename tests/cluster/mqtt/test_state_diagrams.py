"""The pages in docs/ are the ones that the tables in the code give."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import pytest

from scripts import state_diagrams
from tests.support.builds import plain_only


class Light(Enum):
    OFF = "Off"
    ON = "On"
    BROKEN = "Broken"


class Touch(Enum):
    PRESS = "press"
    HIT = "hit: hard"


def switch() -> None:
    """Switch."""


def smash() -> None:
    """Smash; it is over."""


def ignore() -> None:
    """Nothing."""


TABLE: state_diagrams.Table = {
    (Light.OFF, Touch.PRESS): (Light.ON, switch),
    (Light.ON, Touch.PRESS): (Light.OFF, switch),
    (Light.OFF, Touch.HIT): (Light.BROKEN, smash),
    (Light.ON, Touch.HIT): (Light.BROKEN, smash),
    (Light.BROKEN, Touch.PRESS): (Light.BROKEN, ignore),
    (Light.BROKEN, Touch.HIT): (Light.BROKEN, ignore),
}


@plain_only
def test_the_committed_pages_are_up_to_date() -> None:
    assert state_diagrams.main(["--check"]) == 0


def test_a_diagram_of_a_table() -> None:
    assert state_diagrams.diagram(TABLE, "OFF") == [
        "stateDiagram-v2",
        "    [*] --> Off",
        "    Off --> On: press<br/>/ Switch",
        "    On --> Off: press<br/>/ Switch",
        "    Off --> Broken: hit – hard<br/>/ Smash, it is over",
        "    On --> Broken: hit – hard<br/>/ Smash, it is over",
        "    Broken --> [*]",
    ]


def test_rows_that_do_nothing_are_left_out() -> None:
    assert len(state_diagrams.rows(TABLE)) == 2 + 4


def test_an_action_without_a_docstring_is_an_error() -> None:
    with pytest.raises(ValueError, match="docstring"):
        state_diagrams.what(lambda: None)


@plain_only
def test_check_writes_nothing_and_finds_missing_and_stale_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / state_diagrams.PAGES[0].path
    assert state_diagrams.main(["--check"], tmp_path) == 1
    assert not page.exists()
    assert state_diagrams.main([], tmp_path) == 0
    assert state_diagrams.main(["--check"], tmp_path) == 0
    page.write_text(page.read_text(encoding="utf-8") + "edited\n", encoding="utf-8")
    assert state_diagrams.main(["--check"], tmp_path) == 1
    assert "not up to date" in capsys.readouterr().out

"""The table of MQTT's normative statements has all of them, and names tests that exist."""

from __future__ import annotations

import re

from scripts import mqtt_conformance as conformance


def test_every_statement_has_a_row_with_a_test_that_exists_or_a_reason() -> None:
    assert conformance.problems(conformance.PAGE.read_text()) == []


def test_the_numbers_of_statements_are_those_of_the_standards() -> None:
    assert {version: len(conformance.statements(version)) for version in conformance.COUNTS} == {"3.1.1": 141, "5": 251}


def test_the_page_is_what_the_script_writes() -> None:
    page = conformance.PAGE.read_text()
    assert conformance.rewritten(page) == page


def test_a_lost_row_a_lost_test_and_an_invented_statement_are_found() -> None:
    page = conformance.PAGE.read_text()
    lost = re.sub(r"\n\| 3\.12\.4-1 \|.*", "", page, count=1)
    assert conformance.problems(lost) == ["MQTT 3.1.1: 3.12.4-1 has no row"]
    gone = page.replace("::test_every_will_is_published_once`", "::test_that_is_gone`")
    assert any("test_that_is_gone` does not exist" in problem for problem in conformance.problems(gone))
    invented = page.replace("| 3.12.4-1 |", "| 3.12.4-9 |", 1)
    assert "MQTT 3.1.1: 3.12.4-9 is no statement" in conformance.problems(invented)
    unexplained = re.sub(r"(\| 3\.1\.2-23 \|.*\|) of clients \|", r"\1 perhaps |", page, count=1)
    assert any("3.1.2-23: name a test" in problem for problem in conformance.problems(unexplained))

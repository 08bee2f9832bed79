"""`pixiu pipeline record`: a route is added to the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.routes.recording import record
from cluster.routes.routes import read_routes
from pixiu.errors import ConfigurationError, InvalidArgument


def test_a_route_is_added_and_a_wrong_one_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "routes.toml"
    assert record(path, "telemetry/#", "telemetry", deliver=True)[0] == "record-telemetry"
    path.write_text("# by hand\n" + path.read_text())
    name, found = record(path, "room/10-20", "rooms.v1", deliver=False)
    assert (name, len(found.routes)) == ("record-rooms.v1", 2)
    before = path.read_text()
    assert before.startswith("# by hand")
    found = read_routes(path)
    assert [route.case for route in found.routes] == ["stored, and delivered in the log's order", "stored, not delivered"]
    assert [route.name for topic in ("telemetry/7", "room/15") if (route := found.of(topic))] == ["record-telemetry", name]
    for pattern, topic, error in (
        ("telemetry/#", "telemetry", InvalidArgument), ("telemetry/x", "other", ConfigurationError),
        ("a#", "b", ConfigurationError), ('a"', "c", InvalidArgument), ("d", "a b", InvalidArgument),
    ):  # fmt: skip
        with pytest.raises(error) as wrong:
            record(path, pattern, topic, deliver=True)
        assert ".routes.toml." not in str(wrong.value)
    assert path.read_text() == before
    assert [each.name for each in tmp_path.iterdir()] == ["routes.toml"]

"""The options name what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.links.options import LinkOptions
from pixiu.errors import ConfigurationError


def test_defaults_are_valid() -> None:
    LinkOptions().validate()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mtu_bytes", 100),
        ("loopback_mtu_bytes", 100_000),
        ("receive_buffer_bytes", 0),
        ("push_back_ms", 0),
        ("heartbeat_interval_ms", 1),
        ("suspect_after", 0),
        ("dead_after", 1),
        ("dead_after", True),
        ("max_queue_bytes", 1),
        ("max_record_bytes", 39),
        ("stream_frame_bytes", 2.5),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"links.{key}"):
        LinkOptions(**{key: value}).validate()


def test_dead_must_come_after_suspect() -> None:
    with pytest.raises(ConfigurationError, match="dead_after"):
        LinkOptions(suspect_after=4, dead_after=4).validate()

"""The fixtures of the links' tests."""

from __future__ import annotations

import pytest

from tests.cluster.links.world import World


@pytest.fixture
def world() -> World:
    return World()

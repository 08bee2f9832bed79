"""A Pi's shell while its store is not open."""

from __future__ import annotations

from pathlib import Path
from typing import cast
from unittest.mock import MagicMock

from cluster.process.context import Context
from pi.options import Options
from pi.service import Service


async def test_health_and_metrics_are_reported_before_the_inboxes_are_opened(tmp_path: Path) -> None:
    context = MagicMock(options=Options(data_dir=str(tmp_path)), role="pi")
    service = Service(cast("Context[Options]", context))
    health = service.health()
    assert health["degraded"] == ""
    assert health["doubling"] == "NONE"
    assert service._samples() == {}

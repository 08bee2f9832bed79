"""Login guards; what listeners count comes back to zero."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest

from cluster.access.login_guard import LoginGuard
from cluster.core import log
from cluster.trust.audit import Audit
from tests.support.counted import nothing_stays_counted as nothing_stays_counted


@pytest.fixture
async def guards(tmp_path: Path) -> AsyncIterator[Callable[[str], LoginGuard]]:
    made: list[LoginGuard] = []

    def tell(kind: str, fields: Mapping[str, object]) -> None:
        log.get_logger().info("audit", what=kind, **fields)

    def make(text: str) -> LoginGuard:
        (tmp_path / "access.toml").write_text(text)
        made.append(LoginGuard(str(tmp_path / "access.toml"), log.get_logger(), Audit(None, tell=tell)))
        return made[-1]

    yield make
    for guard in made:
        await guard.close()

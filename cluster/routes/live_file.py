"""The file of routes, read again when it has changed.

A changed file is taken when it did not change between two checks, as the access file is. A wrong one changes nothing, and is
logged.

Source: docs/routes.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

from structlog.typing import FilteringBoundLogger

from cluster.access.files import stamp_of
from cluster.routes.routes import Routes, read_routes
from cluster.trust.audit import Audit
from pixiu.errors import ConfigurationError

LOOK_S: Final = 1.0
"""Time between two checks, seconds."""
ROUTES_READ: Final = "routes_read"
ROUTES_WRONG: Final = "routes_wrong"


class RoutesFile:
    """The file. Raises `ConfigurationError` if it is wrong at the start.

    Args:
        path: of the file.
        changed: called with new routes.
        audit: gets a line for each change; None: another process writes it.
    """

    def __init__(
        self, path: str, changed: Callable[[Routes], None], log: FilteringBoundLogger, audit: Audit | None = None
    ) -> None:  # fmt: skip
        self._path, self._changed, self._log, self._audit = Path(path), changed, log, audit
        self._read = self._seen = stamp_of(self._path)
        self.routes = read_routes(self._path)
        self.problem = ""
        """Why the file as it is now is not used; empty: it is."""

    async def look(self) -> None:
        """Look for changes until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.check()

    def check(self) -> None:
        """Look once."""
        before, self._seen = self._seen, stamp_of(self._path)
        if self._seen in (self._read,) or self._seen != before:
            return
        self._read = self._seen
        try:
            found = read_routes(self._path)
        except ConfigurationError as error:
            self.problem = f"the routes before the last change are in use: {str(error).splitlines()[0]}"
            self._log.error(ROUTES_WRONG, error=str(error))
            return
        self.problem, before_routes, self.routes = "", self.routes, found
        self._log.info(ROUTES_READ, path=str(self._path), routes=len(found.routes))
        if self._audit is not None:
            self._audit.write(
                ROUTES_READ, path=str(self._path), before=_shown(before_routes), after=_shown(found)
            )  # fmt: skip
        self._changed(found)


def _shown(routes: Routes) -> list[str]:
    return [f"{each.name}: {each.options.filter or ','.join(each.options.rooms)} {each.case}" for each in routes.routes]

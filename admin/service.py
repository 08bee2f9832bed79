"""An admin's shell: it registers and reports its health. It does not lead yet, and answers no calls.

Source: docs/topics.md.
"""

from __future__ import annotations

from admin.options import Options
from cluster.core.role import RoleShell
from cluster.process.context import Context
from pixiu.discovery.view import View


class Service(RoleShell):
    """An admin's shell, without a core yet."""

    def __init__(self, context: Context[Options]) -> None:
        super().__init__(context.crash)

    def on_view(self, view: View) -> None:
        """Ignore views: nothing depends on them yet."""

    async def start(self) -> None:
        """Start; nothing has to be ready first."""

    async def drain(self) -> None:
        """Hand over nothing: this process leads nothing."""

    async def stop(self) -> None:
        """Stop the tasks."""
        self.stop_runners()
        await self.cancel_tasks()

    def health(self) -> dict[str, object]:
        """Return whether this admin leads."""
        return {"leads": False}

"""gRPC's health service, which needs no login.

The library's service keeps the name that a watcher asks for, of any length, as long as the watcher stays. When two watch one name
and one leaves, the other gets no more changes.

Source: docs/security.md, "What one request may ask for".

"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2  # type: ignore[import-untyped]

MAX_NAME: Final = 256
"""Maximum characters of a service's name."""
TOO_LONG: Final = f"a service's name has at most {MAX_NAME} characters"


class Health(health.aio.HealthServicer):  # type: ignore[misc]
    """Health of the process and of each of its services."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = asyncio.Event()
        """Set and replaced when the status of a service changes."""

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        """Return a service's status."""
        if len(request.service) > MAX_NAME:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, TOO_LONG)
        return await super().Check(request, context)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Send a service's status now, and after every change."""
        if len(request.service) > MAX_NAME:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, TOO_LONG)
        told = None
        while True:
            changed = self._changed
            status = self._server_status.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
            told = status
            await changed.wait()

    async def _set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        self._server_status[service] = status
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

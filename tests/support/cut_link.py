"""A TCP connection's way through this process, counted and cut where a test says."""

from __future__ import annotations

import asyncio

CHUNK = 64 << 10


class CutLink:
    """Passes connections on to a port of this machine.

    Args:
        port: of the server behind it.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.sent = 0
        """Bytes that went to the server."""
        self.cut_at: int | None = None
        """When so many have gone, the client's connection is torn and every new one is refused; None: never."""

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def is_cut(self) -> bool:
        return self.cut_at is not None and self.sent >= self.cut_at

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        if self.is_cut:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        back = asyncio.create_task(self._pass_back(far_reader, writer))
        try:
            while not self.is_cut and (data := await reader.read(CHUNK)):
                self.sent += len(data)
                far_writer.write(data)
                await far_writer.drain()
        except ConnectionError:
            pass
        finally:
            back.cancel()
            writer.transport.abort()
            far_writer.close()  # what has gone arrives

    @staticmethod
    async def _pass_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(CHUNK):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass

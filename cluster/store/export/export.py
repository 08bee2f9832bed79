"""Common parts of the stores' exports: Arrow record batches made in a thread of their own, within a bounded share of a core.

    caller ──▶ Exporter.run ── waits its turn and its rest ──▶ thread: one part ──▶ event loop: one reply

One part is made at a time, however many readers there are. The thread rests after each part, so that all exports of a process
together take at most `share` of a core. A part is about a mebibyte, and the thread releases the interpreter at least every half
millisecond: live traffic never waits for a part, and memory is one part for each reader.

Source: docs/pipeline.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from cluster.core.cancellation import to_its_end
from pixiu.errors import Overloaded, Unavailable
from pixiu.wire.export_tables import Columns
from pixiu.wire.v1 import export_pb2

if TYPE_CHECKING:
    import pyarrow as pa

PART_ROWS: Final = 16_384
PART_BYTES: Final = 1 << 20
"""A part ends after these, whichever is reached first; with users to look for, they count the examined rows."""
MAX_READERS: Final = 16
"""Streams at a time. Policy: a further one is refused with OVERLOADED and tries again, here or at another replica."""
BREATH_S: Final = 0.0005
RETRY_MS: Final = 500
NO_ARROW: Final = (
    "this process cannot export: pyarrow is not installed there; run pip install 'pixiu-cluster[export]' on every Xiu and Pi, "
    "and restart them"
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows, and the position to continue from."""

    batch: pa.RecordBatch | None
    """None: there were no rows here."""
    next: int = 0
    after: bytes = b""
    last: bool = False
    """True if nothing follows."""


class Breath:
    """Releases the interpreter to other threads from time to time, in work that never waits."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def take(self) -> None:
        """Release the interpreter if it is time; call this often."""
        if time.perf_counter() - self._at > BREATH_S:
            time.sleep(0)
            self._at = time.perf_counter()


class Exporter:
    """Runs the exports of one process.

    Args:
        share: fraction of one core, above 0 and at most 1.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="export")
        self._turn = asyncio.Lock()
        self._rest_until = 0.0
        self._closed = False
        self.readers = 0
        self.rows = 0
        self.bytes = 0
        self.busy_s = 0.0
        """CPU seconds of the thread."""

    def close(self) -> None:
        """Stop exports; does not wait for the one that runs."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    def samples(self) -> dict[str, object]:
        """Return samples for metrics."""
        return {
            "export_readers": self.readers,
            "export_rows_total": self.rows,
            "export_bytes_total": self.bytes,
            "export_busy_seconds_total": self.busy_s,
        }

    async def run(self, work: Callable[[], T], guard: AbstractAsyncContextManager[object] | None = None) -> T:
        """Run a function in the thread, after the rest that the work before it requires. Raises Unavailable after `close`.

        `guard` is held meanwhile. A cancelled caller still waits for the thread, which cannot be stopped, so that nobody closes
        what it reads.
        """
        async with self._turn:
            loop = asyncio.get_running_loop()
            pause = self._rest_until - loop.time()
            if pause > 0:
                await asyncio.sleep(pause)
            async with guard or nullcontext():
                if self._closed:
                    raise Unavailable("this process ends; read from another replica")
                result, took = await to_its_end(loop.run_in_executor(self._thread, _timed, work))
            self.busy_s += took
            self._rest_until = loop.time() + took * (1 / self._share - 1)
            return result

    async def stream(
        self, columns: Columns, part: Callable[[], Part], guard: AbstractAsyncContextManager[object] | None = None
    ) -> AsyncIterator[export_pb2.RowsOfReply]:
        """Yield replies made of parts, until the last. Raises Overloaded, and what `part` raises. `guard`: see `run`."""
        if self.readers >= MAX_READERS:
            raise Overloaded(f"{self.readers} readers export from this replica already", RETRY_MS)
        self.readers += 1
        try:
            schema = await self.run(lambda: _schema_bytes(columns))
            while True:
                found, data = await self.run(lambda: _serialized(part()), guard)
                rows = found.batch.num_rows if found.batch is not None else 0
                self.rows += rows
                self.bytes += len(data)
                yield export_pb2.RowsOfReply(schema=schema, batch=data, rows=rows, next=found.next, after=found.after)
                schema = b""
                if found.last:
                    return
        finally:
            self.readers -= 1


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    began = time.thread_time()
    result = work()
    return result, time.thread_time() - began


def _schema_bytes(columns: Columns) -> bytes:
    try:
        from cluster.store.export.arrow import schema_of  # a process that exports nothing does without Arrow's 40 MiB
    except ModuleNotFoundError:
        raise Unavailable(NO_ARROW) from None
    data: bytes = schema_of(columns).serialize().to_pybytes()
    return data


def _serialized(part: Part) -> tuple[Part, bytes]:
    return part, part.batch.serialize().to_pybytes() if part.batch is not None else b""

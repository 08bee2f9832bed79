"""What a Xiu keeps on disk and in shared memory, opened together and in the right order. Blocking, but for what is said.

    data_dir/store   RocksDB: it locks the folder, so it comes first
    data_dir/log     verified from the store's flushed position on
    table            what the log and the store do not know of was never committed, and goes

Source: DESIGN section 11.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from pixiu.errors import ConfigurationError, DiskFailed, StoreDamaged
from pixiu.replication.log import SegmentedLog
from pixiu.replication.model import START
from pixiu.runtime.shared_memory import folder_name
from xiu.options import Options
from xiu.state import BLOCKS, KEY
from xiu.store import Store
from xiu.table import Table, open_table


class Disks:
    """The three of them, open.

    Args:
        options: of the Xiu.
        root: of the cluster, for the table's name.

    Raises ConfigurationError, StorageError.
    """

    def __init__(self, options: Options, root: str) -> None:
        if not options.data_dir:
            raise ConfigurationError('[xiu] data_dir = "": must be the folder of the partition\'s log and store')
        self.folder = Path(options.data_dir)
        self.warnings: list[str] = []
        self.left = 0
        """Blocks in the table that an earlier process had not persisted. Those that commit are decided again from the log."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"[xiu] data_dir = {options.data_dir!r}: cannot be used: {error.strerror}") from None
        self._memtable, self._cache = options.memtable_mb << 20, options.cache_mb << 20
        self.store = self._open_store()
        try:
            segment = options.segment_mb << 20
            try:
                self.log = SegmentedLog(self.folder / "log", segment_bytes=segment, verify_from=self.store.flushed)
            except OSError as error:
                raise DiskFailed(f"the log in {self.folder / 'log'} cannot be opened: {error}") from error
            try:
                self._check()
                self.table = self._open_table(options, root)
            except BaseException:
                self.log.close()
                raise
        except BaseException:
            self.store.close()
            raise

    def _open_store(self) -> Store:
        """A store that is damaged as a whole is set aside and filled from the log, where that still begins at the beginning."""
        folder = self.folder / "store"
        try:
            return Store(folder, memtable_bytes=self._memtable, cache_bytes=self._cache)
        except StoreDamaged as damage:
            log = SegmentedLog(self.folder / "log")
            whole = log.first == START and log.damage is None and log.last != START
            log.close()
            if not whole:
                text = "the log no longer holds everything: restore the folder from a backup or a replica"
                raise StoreDamaged(f"{damage}; {text}") from None
            aside = self.folder / "store.damaged"
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            self.warnings.append(f"{damage}; it was set aside as {aside} and is filled again from the log")
            return Store(folder, memtable_bytes=self._memtable, cache_bytes=self._cache)

    def _check(self) -> None:
        applied, first = self.store.head.applied.counter, self.log.first.counter
        if applied < first:
            raise StoreDamaged(
                f"the store in {self.folder} holds the log up to {applied}, and the log begins after {first}: what is between "
                "them is missing; restore the folder from a backup or a replica"
            )

    def _open_table(self, options: Options, root: str) -> Table:
        owner = f"{root}-{options.partition}-{self.log.member:016x}"
        folder = Path(options.table_dir) / (options.table_name or folder_name("xiu", owner))
        table = open_table(folder, options.table_mb << 20, self.log.member)
        self.left = len(table.recover(self._written))
        return table

    def _written(self, firsts: Sequence[int]) -> list[bool]:
        return [value is not None for value in self.store.get_many([KEY.pack(BLOCKS, first) for first in firsts])]

    def free_bytes(self) -> int:
        """Of the disk. Raises OSError."""
        return shutil.disk_usage(self.folder).free

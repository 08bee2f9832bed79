"""Messages of an archive by MsgID, read from its files: no Spark, no Java, no cluster.

Manifests show which batches may have them, and Parquet's statistics which parts of their files. PATH is a folder, or an address
that Arrow knows: `s3://…`, `gs://…`, `hdfs://…`, `abfs://…`, and any that fsspec knows if it is installed.

Source: docs/pipeline.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from pipeline.folders import arrow_system
from pixiu.errors import ConfigurationError, InvalidArgument, StoreDamaged
from pixiu.wire.export_tables import MESSAGES, TABLES

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.fs import FileSystem

COLUMNS: Final = [name for name, _ in TABLES[MESSAGES]]
PARTITION_SHIFT: Final = 56
SEQUENCE_MASK: Final = (1 << 48) - 1


def read_messages(path: str, msg_ids: Sequence[int]) -> pa.Table:
    """Read the archived messages with these MsgIDs, in the order of positions, with the columns of table `messages`.

    Raises InvalidArgument if there is no archive, StoreDamaged for an unreadable file, ConfigurationError without pyarrow.
    """
    try:
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.dataset as ds
    except ImportError:
        raise ConfigurationError("pyarrow is not installed: pip install 'pixiu-cluster[spark]'") from None
    system, root = _system(path)
    # Signed, as it is stored: the top bit belongs to partitions above 127.
    wanted = [each - (1 << 64) if each >> 63 else each for each in msg_ids]
    found: list[pa.Table] = []
    try:
        for batch in _batches(system, root, wanted, path):
            files = ds.dataset(f"{root}/messages/batch={batch}", filesystem=system, format="parquet")
            there = [name for name in COLUMNS if name in files.schema.names]
            if "msg_id" not in there:
                raise InvalidArgument(f"{path} is no archive of messages: batch {batch} has no column 'msg_id'")
            found.append(files.to_table(columns=there, filter=pc.field("msg_id").isin(wanted)))
    except (pa.ArrowInvalid, OSError) as error:
        raise StoreDamaged(f"the archive in {path} cannot be read: {str(error).splitlines()[0]}") from None
    if not found:
        return pa.table({name: [] for name in COLUMNS})
    table = pa.concat_tables(found, promote_options="default")  # a column that a batch does not have is null
    for name in COLUMNS:
        if name not in table.schema.names:
            table = table.append_column(name, pa.nulls(table.num_rows))
    return table.select(COLUMNS).sort_by([("xiu_partition", "ascending"), ("seq", "ascending")])


def _system(path: str) -> tuple[FileSystem, str]:
    import pyarrow as pa

    try:
        return arrow_system(path)
    except (pa.ArrowInvalid, OSError, ImportError, ValueError) as error:
        raise InvalidArgument(f"{path} is not a folder that Arrow knows: {str(error).splitlines()[0]}") from None


def _batches(system: FileSystem, root: str, msg_ids: Sequence[int], path: str) -> list[int]:
    """The batches with a manifest that may have one of these messages."""
    from pyarrow.fs import FileSelector, FileType

    places = [(each >> PARTITION_SHIFT & 0xFF, each & SEQUENCE_MASK) for each in msg_ids]
    found: set[int] = set()
    replaced: set[int] = set()
    try:
        files = system.get_file_info(FileSelector(f"{root}/manifest", recursive=True))
    except FileNotFoundError:
        raise InvalidArgument(f"{path} holds no archive: it has no folder `manifest`") from None
    for file in files:
        parts = file.path.rsplit("/", 2)
        if file.type is not FileType.File or not file.path.endswith(".json") or not parts[-2].startswith("batch="):
            continue
        with system.open_input_stream(file.path) as stream:
            text = stream.read()
        try:
            manifest = [json.loads(line) for line in text.splitlines()]
            lines = [(line["xiu_partition"], line["first"], line["last"]) for line in manifest]
            replaced |= {batch for line in manifest for batch in line.get("replaces") or ()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise StoreDamaged(f"the manifest {file.path} cannot be read: `pixiu pipeline archive {path} --verify`") from None
        if any(partition == of and first <= seq <= last for partition, seq in places for of, first, last in lines):
            found.add(int(parts[-2].removeprefix("batch=")))
    return sorted(found - replaced)

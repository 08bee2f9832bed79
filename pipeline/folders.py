"""Folders, on any file system that Spark knows; of a session of Spark Connect, on any that Arrow knows.

    session of Spark itself  ──▶ Hadoop's file systems, in the JVM of this process
    Spark Connect            ──▶ a task of the server: a folder may be on its disk, and no JVM is here

Source: docs/pipeline.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.fs import FileSystem


def is_connect(spark: Any) -> bool:
    """True for a session of Spark Connect, which has no JVM here."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def arrow_system(path: str) -> tuple[FileSystem, str]:
    """Arrow's file system of a path, and the path in it. Raises ValueError, OSError and ImportError, as Arrow does."""
    from pyarrow.fs import FileSystem, LocalFileSystem

    if "://" not in path and not path.startswith("file:"):
        return LocalFileSystem(), str(Path(path).resolve())
    system, root = FileSystem.from_uri(path)
    return system, root.rstrip("/")


def names_in(spark: Any, folder: str) -> list[str]:
    """List the names in a folder; empty if there is no folder."""
    if is_connect(spark):
        return _in_a_task(spark, _names, folder)
    root = spark._jvm.org.apache.hadoop.fs.Path(folder)
    system = root.getFileSystem(spark._jsc.hadoopConfiguration())
    return [str(each.getPath().getName()) for each in system.listStatus(root)] if system.exists(root) else []


def remove_folder(spark: Any, folder: str) -> None:
    """Remove a folder and everything in it, if it is there."""
    if is_connect(spark):
        _in_a_task(spark, _removed, folder)
        return
    root = spark._jvm.org.apache.hadoop.fs.Path(folder)
    root.getFileSystem(spark._jsc.hadoopConfiguration()).delete(root, True)


def _in_a_task(spark: Any, work: Callable[[str], list[str]], folder: str) -> list[str]:
    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for _ in batches:  # one, of one row
            yield pa.RecordBatch.from_pydict({"name": pa.array(work(folder), pa.string())})

    return [row.name for row in spark.range(0, 1, 1, 1).mapInArrow(task, "name string").collect()]


def _names(folder: str) -> list[str]:
    from pyarrow.fs import FileSelector

    system, root = arrow_system(folder)
    return [each.base_name for each in system.get_file_info(FileSelector(root, allow_not_found=True))]


def _removed(folder: str) -> list[str]:
    from pyarrow.fs import FileType

    system, root = arrow_system(folder)
    if system.get_file_info(root).type is not FileType.NotFound:
        system.delete_dir(root)
    return []

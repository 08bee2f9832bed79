"""An object store: a folder, or any URL that fsspec opens. Blocking: to be called in threads.

Source: docs/topics.md, "Storage apart from compute".
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from pixiu.errors import ConfigurationError, InvalidArgument, MalformedData, Unavailable
from pixiu.objects.manifest import Manifest, check_url, folder_of, manifests_in

MANIFEST_TRIES: Final = 5
"""Listings until a manifest is read that was not replaced meanwhile."""
Found = TypeVar("Found")


class ObjectMissing(MalformedData):
    """An object that should be there is not."""


class ObjectExists(MalformedData):
    """An object that was to be made is there."""


class ObjectStore:
    """One store.

    Args:
        url: of it.
        files: fsspec's file system, and the path of the store in it; None: opened by the URL.

    Raises ConfigurationError if fsspec, or what it needs for this URL, is missing.
    """

    def __init__(self, url: str, files: tuple[Any, str] | None = None) -> None:
        self.url = check_url(url)
        self._fs, self._root = files or _opened(self.url)
        protocol = self._fs.protocol
        self._folder = Path(self._root) if "file" in ((protocol,) if isinstance(protocol, str) else protocol) else None

    def put(self, name: str, data: bytes) -> None:
        """Write an object, durably as far as the store is. Raises Unavailable."""
        if self._folder is not None:
            self._told("write", name, lambda: _write(self._path(name), data, create=False))
        else:
            self._told("write", name, lambda: self._fs.pipe_file(self._path(name), data))

    def create(self, name: str, data: bytes) -> None:
        """Write an object that is not there. Raises ObjectExists, if the store can tell; Unavailable."""
        if self._folder is not None:
            self._told("write", name, lambda: _write(self._path(name), data, create=True))
        else:
            self._told("write", name, lambda: self._create(self._path(name), data))

    def _create(self, path: str, data: bytes) -> None:
        try:
            self._fs.pipe_file(path, data, mode="create")
        except (TypeError, NotImplementedError):  # the file system has no such mode
            if self._fs.exists(path):
                raise FileExistsError(path) from None
            self._fs.pipe_file(path, data)

    def read(self, name: str) -> bytes:
        """Read an object. Raises ObjectMissing, Unavailable."""
        return bytes(self._told("read", name, lambda: self._fs.cat_file(self._path(name))))

    def names(self, folder: str) -> list[str]:
        """The names of the objects in a folder, with it. Raises Unavailable."""

        def listed() -> list[str]:
            self._fs.invalidate_cache()
            return [str(each) for each in self._fs.ls(self._path(folder), detail=False)]

        try:
            found = self._told("list", folder, listed)
        except ObjectMissing:
            return []
        return sorted(f"{folder}/{each.rstrip('/').rpartition('/')[2]}" for each in found)

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, which may be gone. Raises Unavailable."""
        for name in names:
            try:
                self._told("remove", name, partial(self._fs.rm_file, self._path(name)))
            except ObjectMissing:
                continue

    def manifest(self, topic: int, number: int) -> Manifest | None:
        """The newest manifest of a part; None: it has none. Raises Unavailable, MalformedData."""
        problem: MalformedData | None = None
        for _ in range(MANIFEST_TRIES):
            names = manifests_in(self.names(folder_of(topic, number)))
            if not names:
                return None
            for name in names:
                try:
                    return Manifest.decode(self.read(name))
                except ObjectMissing as replaced:
                    problem = replaced
                    break
                except MalformedData as torn:  # a writer was killed in a folder; the one before it is still there
                    problem = torn
        raise problem or MalformedData(f"{self.url}: the manifest of part {number} of topic {topic} cannot be read")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _told(self, act: str, name: str, work: Callable[[], Found]) -> Found:
        """Work at the store. Raises ObjectMissing, ObjectExists, Unavailable in place of its own errors."""
        try:
            return work()
        except FileNotFoundError as problem:
            if act == "write":
                raise Unavailable(f"{self.url}: the folder of {name} cannot be made; it is tried again") from problem
            raise ObjectMissing(f"{self.url}: there is no {name}") from problem
        except FileExistsError as problem:
            raise ObjectExists(f"{self.url}: {name} is there already") from problem
        except Exception as problem:  # each file system has its own
            said = f"{type(problem).__name__}: {str(problem)[:200]}"
            raise Unavailable(f"the object store {self.url} cannot {act} {name} now ({said}); it is tried again") from problem


def _write(path: str, data: bytes, *, create: bool) -> None:
    """Write a file as a whole, and sync it with its name and that of its folder."""
    target = Path(path)
    made = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(made, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if create:
            os.link(made, target)  # fails if it is there
        else:
            made.replace(target)
    finally:
        made.unlink(missing_ok=True)
    for folder in (target.parent, target.parent.parent):  # the name of a folder, too, whoever made it
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_protocol(url: str) -> None:
    """Check that fsspec knows the protocol of a URL; without fsspec here, nothing is known. Raises InvalidArgument."""
    protocol, found, _ = url.partition("://")
    if not found:
        return
    try:
        from fsspec.registry import available_protocols
    except ImportError:
        return
    known = available_protocols()
    if protocol.rpartition("::")[2] not in known:
        usual = ", ".join(each for each in ("s3", "gs", "abfs", "hdfs") if each in known)
        raise InvalidArgument(
            f"the store {url[:128]} has the protocol {protocol[:32]}, which fsspec does not know; use an absolute folder, or one "
            f"that it knows ({usual} …), and install its package on every machine of topics"
        )


def _opened(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError as missing:
        raise ConfigurationError(
            f"the store {url} needs fsspec, which is not installed; install pixiu-cluster[store] on every machine of topics"
        ) from missing
    try:
        files, root = fsspec.core.url_to_fs(url)
    except ImportError as missing:
        raise ConfigurationError(f"the store {url} needs a package that is not installed: {missing}") from missing
    except Exception as problem:
        raise ConfigurationError(f"the store {url} cannot be opened: {problem}") from problem
    return files, str(root)

"""Secrets of connectors: each is in a file of its own, so that no configuration and no status shows one."""

from __future__ import annotations

from cluster.settings.options import read_bounded
from pixiu.errors import ConfigurationError

MAX_SECRET_BYTES = 8192


def secret_of(path: str, key: str) -> str:
    """The content of a secret's file, without spaces around it; empty for no path. Raises `ConfigurationError`."""
    if not path:
        return ""
    try:
        text = read_bounded(path, MAX_SECRET_BYTES, f"{key}: the file").decode().strip()
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path}: {key}: the file is not text") from None
    if not text:
        raise ConfigurationError(f"{path}: {key}: the file is empty")
    return text

"""Keeping secrets out of a support bundle: by the values that this machine's files hold, and by the form of what is written.

    the options' files  ──secret_files──▶  keys, certificates, logins  ──secrets_of──▶  their values
    every file of the bundle  ──Redaction.text──▶  without these values, PEM blocks, tokens, `password=…`, logins in URLs
    configuration  ──Redaction.tables──▶  the values of options that Pixiu has; of every other key the name alone

Source: docs/deployment.md, "A support bundle".
"""

from __future__ import annotations

import errno
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

REDACTED: Final = "[redacted]"
MIN_SECRET: Final = 8
"""Length from which a word of a file of secrets is looked for, characters. Shorter words would blank ordinary text."""
MAX_SECRET_FILE_BYTES: Final = 1 << 20
MAX_SECRET_FILES: Final = 1000
SECRET_NAME: Final = re.compile(r"secret|passw|token|credential|authorization|api_?key|private", re.IGNORECASE)
"""Names of keys whose values are not shown, even of options that Pixiu has."""
PLACE: Final = re.compile(r"_(dir|file|ca|certificate|key)$")
"""Options that name files and folders."""
NO_SECRETS: Final = ("data_dir", "trace_dir", "audit_dir", "table_dir", "probe_file")
"""Those that hold what the cluster stores."""

ABSENT: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL)
"""Errors that say that there is no file of a name."""

_PEM = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----.*?(?:-----END \1-----|\Z)", re.DOTALL)
_TOKEN = re.compile(rb"\beyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]*)?")
_BEARER = re.compile(rb"\b([Bb]earer|[Bb]asic)( +)[A-Za-z0-9+/=._~-]{12,}")
_NAME = rb"(?:secret|passw(?:or)?d|passphrase|token|authorization|api[_-]?key|private[_-]?key)"
_QUOTED = rb"""(?P<open>[bru]?(?P<quote>\\*["']))(?!\[redacted\]|(?P=quote)).+?(?=(?<!\\)(?P=quote)|$)"""
"""Up to the same quote, escaped as often; without one, up to the end of the line."""
_NAMED = re.compile(
    rb"""(?P<name>(?<![/A-Za-z_-])[A-Za-z_-]*""" + _NAME + rb"""\\*["']?\s*[:=]\s*)"""
    rb"""(?:""" + _QUOTED + rb"""|(?!\[redacted\])[^\s"',;}&\]]{3,})""",
    re.IGNORECASE | re.MULTILINE,
)  # fmt: skip
"""`password=VALUE`, `"token": "VALUE"`."""
_FLAG = re.compile(
    rb"""(?P<name>(?<![\w/-])--?[A-Za-z_-]*""" + _NAME + rb"""(?:[ \t]+|\\*["']\s*,?\s*(?=[bru]?\\*["'])))"""
    rb"""(?!["'\\]*--)(?:""" + _QUOTED + rb"""|(?!\[redacted\])[^\s"']+)""",
    re.IGNORECASE | re.MULTILINE,
)  # fmt: skip
"""`--password VALUE`, also in a list of arguments. The next option is no value."""
_URL = re.compile(rb"([a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/@\"']+@")
_KEY_OR_PATH = re.compile(rb"[a-z]+(?:_[a-z]+)+|(?:/[a-z0-9._-]+)+")
"""In lower case alone, which no line of base64 is."""
_PASSWORD_HASH = re.compile(rb"\$(?:argon2\w*|2[aby]|scrypt|pbkdf2\S*|5|6|7|y)\$[^\s\"']+")


def secret_files(tables: Iterable[Mapping[str, Any]], base: Path) -> list[Path]:
    """Return the files of keys, certificates and logins that tables of options name, at most `MAX_SECRET_FILES`.

    base: the folder that relative paths are in. A folder stands for the files directly in it, an access file for those that it
    names and for the keys beside it, with which tokens are made, as well. What this user may not look at is returned as well:
    `secrets_of` names it.
    """
    found: list[Path] = []
    for table in tables:
        for key, value in table.items():
            if not (isinstance(value, str) and value and PLACE.search(key)) or key.endswith(NO_SECRETS):
                continue
            place = base / value
            if _is_folder(place):
                found += _files_in(place)
            elif _may_be_file(place):
                found += [place, *(_named_by(place) if key.endswith("access_file") else ())]
    return found[:MAX_SECRET_FILES]


def _is_folder(place: Path) -> bool:
    try:
        return stat.S_ISDIR(place.stat().st_mode)
    except (OSError, ValueError):
        return False


def _may_be_file(place: Path) -> bool:
    """False for what is not there and for what is no regular file; True for what this user may not look at."""
    try:
        return stat.S_ISREG(place.stat().st_mode)
    except OSError as error:
        return error.errno not in ABSENT
    except ValueError:
        return False


def _files_in(folder: Path) -> list[Path]:
    """The files directly in a folder; the folder itself if this user may not list it."""
    try:
        return sorted(path for path in folder.iterdir() if _may_be_file(path))
    except OSError:
        return [folder]


def _named_by(access: Path) -> list[Path]:
    keys = [path for path in _files_in(access.parent) if path == access.parent or path.suffix in (".pem", ".key")]
    try:
        tables = tomllib.loads(access.read_text())
    except (OSError, ValueError):
        return keys
    values = [value for table in tables.values() if isinstance(table, dict) for value in table.values()]
    return keys + [path for value in values if isinstance(value, str) and value and _may_be_file(path := access.parent / value)]


def secrets_of(paths: Iterable[Path]) -> tuple[frozenset[bytes], dict[Path, str]]:
    """Return the words of files that may be secrets, and the files that cannot be read, with the reason.

    The words are lines, and what stands between spaces, quotes and colons. Another user's process may have logged the words of a
    file that this user may not read: with such a file, no text is known to be without secrets.
    """
    found: set[bytes] = set()
    unread: dict[Path, str] = {}
    for path in paths:
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_SECRET_FILE_BYTES)
        except FileNotFoundError:
            continue  # it was removed meanwhile
        except OSError as error:
            unread[path] = error.strerror or type(error).__name__
            continue
        found.update(_words(data))
    return frozenset(found), unread


def _words(data: bytes) -> Iterator[bytes]:
    whole = data.strip()
    if MIN_SECRET <= len(whole) <= 4096:
        yield whole
    for line in data.splitlines():
        for word in (line.strip(), *re.split(rb"""[\s"',;:=]+""", line)):
            if len(word) >= MIN_SECRET and _looks_secret(word):
                yield word


def _looks_secret(word: bytes) -> bool:
    """False for ordinary words, paths and names of a file of rules, which are in logs as well."""
    if word.startswith(b"-----") or b"://" in word or _KEY_OR_PATH.fullmatch(word):
        return False
    return len(word) >= 16 or (any(48 <= byte < 58 for byte in word) and any(byte >= 65 for byte in word))


def _hidden(match: re.Match[bytes]) -> bytes:
    return match["name"] + (match["open"] or b"") + REDACTED.encode()


class Redaction:
    """Removes secrets.

    Args:
        secrets: values that may stand nowhere.
    """

    def __init__(self, secrets: Iterable[bytes] = ()) -> None:
        known = sorted((secret for secret in secrets if len(secret) >= MIN_SECRET), key=lambda secret: (-len(secret), secret))
        self._known = re.compile(b"|".join(map(re.escape, known))) if known else None

    def text(self, data: bytes) -> bytes:
        """Return a text without secrets. What is no secret stays as it is."""
        mark = REDACTED.encode()
        if self._known is not None:
            data = self._known.sub(mark, data)
        data = _PEM.sub(mark, data)
        data = _TOKEN.sub(mark, data)
        data = _BEARER.sub(rb"\1\2" + mark, data)
        data = _FLAG.sub(_hidden, data)
        data = _NAMED.sub(_hidden, data)
        data = _PASSWORD_HASH.sub(mark, data)
        return _URL.sub(rb"\1" + mark + b"@", data)

    def tables(self, tables: Mapping[str, Any], known: Mapping[str, Iterable[str]]) -> dict[str, Any]:
        """Return a configuration file's tables for others to read.

        known: table → options that Pixiu has. Of other keys, and of those that are named like secrets and name no file, the value
        is left out.
        """
        return {
            name: {key: self._value(key, value, key in set(known.get(name, ()))) for key, value in table.items()}
            if isinstance(table, Mapping)
            else REDACTED
            for name, table in tables.items()
        }

    def _value(self, key: str, value: Any, is_known: bool) -> Any:
        if not is_known or (SECRET_NAME.search(key) and not PLACE.search(key) and isinstance(value, str)):
            return REDACTED
        return self.text(value.encode()).decode(errors="replace") if isinstance(value, str) else value

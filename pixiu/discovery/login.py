"""The login of this process at the registry: from a file that only its owner may read.

    FILE     a line for each login, role and password; a process takes the lines of its role, a command all of them

`[cluster] registry_credentials_file` names the file, or for commands the environment. Otherwise it is the file that an embedded
ZooKeeper of the same user on this machine has left where all programs of this user find it.

Source: docs/security.md, "The registry".
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Final

from pixiu.discovery.access import parse_credentials
from pixiu.errors import ConfigurationError

CREDENTIALS_FILE: Final = "PIXIU_CLUSTER_REGISTRY_CREDENTIALS_FILE"
"""Environment variable that names the file, for commands and processes."""
MAX_FILE: Final = 65_536
MADE_BY: Final = "`pixiu registry credentials` makes such a file"


class Login:
    """A file of logins.

    Args:
        path: the file.
        roles: the roles of the process, to take only their lines; none: all lines.
    """

    def __init__(self, path: Path, *roles: str) -> None:
        self.path, self.roles = path, roles

    def read(self) -> dict[str, tuple[str, ...]]:
        """Read login → passwords. Raises `ConfigurationError` that names the file and the problem."""
        try:
            with open(self.path, encoding="utf-8", errors="replace") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = file.read(MAX_FILE)
        except OSError as error:
            raise ConfigurationError(f"registry credentials {self.path}: cannot be read: {error.strerror}; {MADE_BY}") from None
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigurationError(f"registry credentials {self.path}: others may read or change it: chmod 600 {self.path}")
        found = parse_credentials(text, f"registry credentials {self.path}")
        for role in self.roles:
            if role not in found:
                raise ConfigurationError(
                    f"registry credentials {self.path}: has no line for {role}: copy it from the operator's file"
                )
        return {role: found[role] for role in self.roles or found}


class _Own:
    """The login of a command. A role of a cluster passes its own: several may run in one process."""

    def __init__(self) -> None:
        self.login: Login | None = None


_own = _Own()


def use(login: Login | None) -> None:
    """Use this login as this program's own from now on; None: the file that the environment names."""
    _own.login = login


def own(hosts: str, *roles: str) -> Login | None:
    """The login, at a ZooKeeper (`host:port[,host:port]`), of a program that was given none; None: there is none.

    roles: see `Login`.
    """
    if _own.login is not None:
        return _own.login
    named = os.environ.get(CREDENTIALS_FILE, "")
    if named:
        return Login(Path(named), *roles)
    try:
        left = left_at(hosts)
        return Login(left, *roles) if left.exists() and left.stat().st_uid == os.getuid() else None
    except OSError:
        return None


def left_at(hosts: str) -> Path:
    """Path at which an embedded ZooKeeper leaves a link to its logins for all programs of this user."""
    return runtime_folder() / f"registry-{hosts}"


def runtime_folder() -> Path:
    """Folder that belongs to this user alone, for the uptime of the machine."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(given) / "pixiu" if given else Path(tempfile.gettempdir()) / f"pixiu-{os.getuid()}"


def leave(hosts: str, file: Path) -> Path | None:
    """Leave a link to the logins of an embedded ZooKeeper. None if the folder does not belong to this user alone: nothing is left
    then."""
    try:
        folder = runtime_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return None
        link, new = left_at(hosts), folder / f".{os.getpid()}"
        new.unlink(missing_ok=True)
        new.symlink_to(file.resolve())
        new.rename(link)
    except OSError:
        return None
    return link

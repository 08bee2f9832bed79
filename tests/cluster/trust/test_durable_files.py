"""Files that must survive a power cut: their content and their names are on the disk when they are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.access.minting import KEYS, key_of
from cluster.access.passwords import put_user
from cluster.routes.recording import record
from cluster.trust.audit import NAME, Audit
from cluster.trust.key_folder import add_key, use_key
from cluster.trust.pki import issue, make_authority
from pixiu.durable import replace_file
from registry.credentials import write_credentials
from tests.support.synced_names import SyncedNames
from tools.tail.files import Files


def audited(folder: Path) -> Path:
    """The first file of an audit log."""
    log = Audit(folder)
    log.write("start")
    log.close()
    return folder / NAME


def issued(folder: Path) -> Path:
    """A role's certificate."""
    make_authority(folder / "authority")
    return issue(folder / "authority", "proxy", folder / "certificates")


def key_in_use(folder: Path) -> Path:
    """A key of datagrams."""
    add_key(folder)
    return use_key(folder)


def logins(folder: Path) -> Path:
    """The logins of the registry."""
    write_credentials(folder / "credentials", {"operator": ("p" * 64,)})
    return folder / "credentials"


def user(folder: Path) -> Path:
    """A file of passwords."""
    folder.mkdir()
    put_user(folder / "users", "ann", "ann:7::x")
    return folder / "users"


def minting_key(folder: Path) -> Path:
    """A key that signs tokens."""
    key_of(folder / "jwt.pem")
    return folder / "jwt.pem"


def key_set(folder: Path) -> Path:
    """The public half of it."""
    key_of(folder / "jwt.pem")
    return folder / KEYS


def positions(folder: Path) -> Path:
    """The positions of `pixiu tail`."""
    folder.mkdir()
    (folder / "app.log").write_text("a line\n")
    files = Files([str(folder / "app.log")], folder / "positions")
    files.look()
    files.close()
    return folder / "positions"


def linked(folder: Path) -> Path:
    """A rotated file that `pixiu tail` has linked, so that nobody can remove it."""
    positions(folder)
    (folder / "app.log").rename(folder / "app.log.1")
    (folder / "app.log").write_text("another\n")
    files = Files([str(folder / "app.log")], folder / "positions")
    files.look()
    files.close()
    (found,) = (each for each in (folder / "positions.spill").iterdir() if each.name != "lock")
    return found


def routes(folder: Path) -> Path:
    """A file of routes."""
    folder.mkdir()
    record(folder / "routes.toml", "a/#", "a", deliver=False)
    return folder / "routes.toml"


@pytest.mark.parametrize(
    "made",
    [audited, issued, key_in_use, logins, user, minting_key, key_set, positions, linked, routes],
    ids=lambda made: str(made.__name__),
)
def test_a_power_cut_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[[Path], Path]) -> None:
    folder = tmp_path / "new"
    synced = SyncedNames(monkeypatch)
    path = made(folder)
    there = path.stat()
    if made is linked:  # its content is its writer's
        synced.files.add((there.st_ino, there.st_size))
    above = folder if made in (user, positions, linked, routes) else tmp_path  # a folder that the test has made
    assert synced.keep(path, above)


def test_a_file_that_cannot_be_replaced_stays_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(tmp_path / "file", b"x")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]

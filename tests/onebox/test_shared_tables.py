"""Tables of newest records where shared memory is small, such as a container's 64 MiB."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.replication.model import MemberID
from gateway.delivery.signal_table import SharedTable
from gateway.delivery.signal_table import open_table as open_signals
from onebox.shared_tables import fitting_mb, table_mb
from pixiu.errors import ConfigurationError
from tests.support.disks import small_disk
from xiu.records.table import open_table

ROOT = "/pubsub"


@pytest.mark.parametrize(("tables", "free_mb", "size"), [(2, 96, 48), (2, 500, 64), (2, 15, 8), (4, 0, 8), (1, -32, 8)])
def test_tables_share_what_is_free(tables: int, free_mb: int, size: int) -> None:
    assert fitting_mb(64, tables, free_mb) == size


def asked(folder: Path, *settings: str, environ: dict[str, str] | None = None) -> tuple[int, int] | None:
    """What two Xius and two gateways get in a folder."""
    places = (f"xiu.table_dir={folder}", f"gateway.signal_table_dir={folder}")
    return table_mb(2, 2, ROOT, (*places, *settings), None, environ or {})


@pytest.mark.process
def test_a_default_cluster_fits_into_64_mib(tmp_path: Path) -> None:
    with small_disk(tmp_path / "shm", "64m") as folder:
        found = asked(folder)
        assert found == (16, 64)
        tables = [open_table(folder / f"pixiu-xiu-pubsub-0-{number}", found[0] << 20, MemberID(number)) for number in (1, 2)]
        signals = [open_signals(folder, f"pixiu-signals-pubsub-h-{number}", 16 << 20) for number in (1, 2)]
        assert all(isinstance(made, SharedTable) and not why for made, why in signals)
        assert asked(folder) == (16, 64), "what killed processes left is used again"
        with pytest.raises(ConfigurationError, match="No space left"):
            open_table(folder / "one-more", 8 << 20, MemberID(3))
        for table in tables:
            table.close(remove=True)
        for made, _ in signals:
            assert isinstance(made, SharedTable)
            made.close(remove=True)


@pytest.mark.process
def test_a_size_that_was_chosen_stays(tmp_path: Path) -> None:
    with small_disk(tmp_path / "shm", "64m") as folder:
        assert asked(folder, "xiu.table_mb=64") is None
        assert asked(folder, environ={"PIXIU_XIU_TABLE_MB": "48"}) is None
    with small_disk(tmp_path / "large", "200m") as folder:
        assert asked(folder) is None
        assert table_mb(0, 2, ROOT, (), None, {}) is None

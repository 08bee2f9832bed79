"""What a machine has left: its memory, or less where a control group allows less; the disk of the data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.metrics.host import host_samples, memory_available
from cluster.metrics.metrics import Metrics


def test_a_control_group_bounds_the_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:    64 kB\n")
    assert memory_available(meminfo, tmp_path) == 64 << 10
    (tmp_path / "memory.current").write_text("1000\n")
    for limit, left in (("max", 64 << 10), ("3000", 2000), ("500", 0), ("nonsense", 64 << 10)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert memory_available(meminfo, tmp_path) == left
    meminfo.write_text("MemTotal: 100 kB\n")
    with pytest.raises(ValueError, match="MemAvailable"):
        memory_available(meminfo, tmp_path)


async def test_metrics_show_it_and_what_cannot_be_told_is_left_out(tmp_path: Path) -> None:
    metrics = Metrics("pi", 3)
    metrics.collect_in_thread(lambda: host_samples(str(tmp_path)))

    def broken() -> dict[str, float]:
        raise OSError("no answer")

    metrics.collect_in_thread(broken)
    page = (await metrics.render()).decode()
    (line,) = (line for line in page.splitlines() if line.startswith("pixiu_pi_data_dir_free_bytes{"))
    stat = os.statvfs(tmp_path)
    assert 0 < float(line.split()[1]) <= stat.f_blocks * stat.f_frsize
    assert 'pixiu_pi_machine_memory_available_bytes{role="pi",partition="3"}' in page
    assert host_samples("").keys() == {"machine_memory_available_bytes"}
    assert "data_dir_free_bytes" not in host_samples("/no/such/folder")

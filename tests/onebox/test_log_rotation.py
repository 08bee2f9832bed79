"""The log of a process that runs is started anew when it is too large."""

from __future__ import annotations

from pathlib import Path

from onebox.children import open_log, rotate_log


def test_a_running_process_goes_on_in_the_file_that_it_has(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "gateway-0.log"
    with open_log(log) as output:
        output.write(b"x" * 1000)
        output.flush()
        assert not rotate_log(log, 1000)
        assert rotate_log(log, 999)
        output.write(b"after")
    assert log.read_bytes() == b"after"
    assert log.with_suffix(".old").read_bytes() == b"x" * 1000


def test_a_log_that_is_gone_is_no_error(tmp_path: Path) -> None:
    assert not rotate_log(tmp_path / "gone.log")

"""What `pixiu pipeline record` says of the file of routes that it wrote: whether proxies read it. No Java."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.recording import read_by


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (None, "Proxies read it if their option proxy.routes names {file}; `pixiu routes status`"),
        (
            ["/etc/other.toml", "{file}"],
            "Not stored yet: the running proxies read /etc/other.toml, not {file}. Give that as --file",
        ),
        (["", ""], "Not stored yet: no running proxy reads a file of routes. Start proxies with proxy.routes={file}"),
        (["", "{file}"], "Some running proxies read no file of routes: start all with proxy.routes={file}"),
        (["{file}", "{file}"], "All running proxies read {file}; `pixiu routes status`"),
    ],
)
def test_it_says_who_reads_the_file(tmp_path: Path, files: Sequence[str] | None, said: str) -> None:
    file = tmp_path / "routes.toml"
    found = read_by(file, files and [each.format(file=file) for each in files])
    assert said.format(file=file) in found
    assert "`pixiu routes status`" in found

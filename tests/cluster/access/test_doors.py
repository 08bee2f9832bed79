"""Who calls: a process of the cluster, by its proof."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.access.doors import KEYS_S, ProcessProofs
from cluster.access.process_login import prove
from cluster.runtime.options import ClusterOptions


def call(proof: str) -> Any:
    return SimpleNamespace(invocation_metadata=lambda: (("authorization", proof),))


def test_a_strangers_calls_read_no_files_and_are_told_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret, read, now = b"of-the-cluster-1", [0], [100.0]
    (tmp_path / "secret").write_bytes(secret)
    cluster = ClusterOptions(secret_file=str(tmp_path / "secret"))
    proofs = ProcessProofs(cluster, lambda: now[0])
    secret_of = ClusterOptions.secret

    def counted(options: ClusterOptions) -> bytes | None:
        read[0] += 1
        return secret_of(options)

    monkeypatch.setattr(ClusterOptions, "secret", counted)
    for _ in range(100):
        assert not proofs.is_process(call("PixiuProcess x.y.z"), "gateway")
        assert not proofs.is_process(call("Bearer x"), "gateway")
    assert read == [1]
    good = call(prove(secret, "gateway", 7, time.time()))
    assert proofs.is_process(good, "gateway")
    assert not proofs.is_process(good, "proxy")
    (tmp_path / "secret").write_bytes(b"short")
    now[0] += KEYS_S
    assert not proofs.is_process(good, "gateway")  # and no error with a path in it
    (tmp_path / "secret").write_bytes(secret)
    now[0] += KEYS_S
    assert proofs.is_process(good, "gateway")
    assert read == [3]

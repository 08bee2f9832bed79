"""The audit log: what is changed, missing or put between is found; files follow each other; nothing secret goes in."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.trust.audit import LIMITED_S, MAX_KEYS, NAME, Audit, verify
from ops.access.audit_command import audit as audit_command
from pixiu.errors import ConfigurationError, MalformedData


def written(folder: Path, lines: int = 5, file_bytes: int = 1 << 20) -> list[bytes]:
    audit = Audit(folder, {"role": "pi", "partition": 0}, file_bytes=file_bytes)
    for number in range(lines):
        audit.write("promotion", operator="ann", reason=f"because {number}", last=[1, number])
    audit.close()
    return (folder / NAME).read_bytes().splitlines(keepends=True)


def test_a_chain_is_whole_and_says_who_did_what(tmp_path: Path) -> None:
    lines = written(tmp_path)
    found = verify(tmp_path)
    assert (found.lines, found.first, found.last) == (5, 1, 5)
    assert verify(tmp_path / NAME) == found
    fields = json.loads(lines[2])
    assert (fields["n"], fields["kind"], fields["role"], fields["reason"]) == (3, "promotion", "pi", "because 2")
    assert fields["previous"] == json.loads(lines[1])["hash"]
    assert found.head == json.loads(lines[4])["hash"]
    assert (tmp_path / NAME).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("forge", "what"),
    [
        (lambda lines: [lines[0], lines[1].replace(b"ann", b"bob"), *lines[2:]], f"{NAME}:2: was changed"),
        (lambda lines: [*lines[:2], *lines[3:]], f"{NAME}:3: is line 4 .* missing"),
        (lambda lines: [*lines[:3], lines[2], *lines[3:]], f"{NAME}:4: is line 3 .* twice"),
        (lambda lines: [*lines[:2], b'{"n": 3, "kind": "nothing"}\n', *lines[2:]], f"{NAME}:3: has no hash"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], f"{NAME}:2: is line 1"),
    ],
)
def test_what_was_changed_is_named(tmp_path: Path, forge: object, what: str) -> None:
    (tmp_path / NAME).write_bytes(b"".join(forge(written(tmp_path))))  # type: ignore[operator]
    with pytest.raises(MalformedData, match=what):
        verify(tmp_path)


def test_a_line_of_another_chain_with_the_right_number_is_found(tmp_path: Path) -> None:
    own = written(tmp_path / "a")
    other = Audit(tmp_path / "b")
    for _ in range(5):
        other.write("promotion", operator="mallory")
    other.close()
    forged = (tmp_path / "b" / NAME).read_bytes().splitlines(keepends=True)
    (tmp_path / "a" / NAME).write_bytes(b"".join([*own[:2], forged[2], *own[3:]]))
    with pytest.raises(MalformedData, match="does not continue the line before it"):
        verify(tmp_path / "a")


def test_the_chain_goes_on_after_a_restart_and_a_torn_line(tmp_path: Path) -> None:
    written(tmp_path, 2)
    with open(tmp_path / NAME, "ab") as file:
        file.write(b'{"n": 3, "at')
    assert verify(tmp_path).lines == 2
    written(tmp_path, 2)
    found = verify(tmp_path)
    assert (found.lines, found.last) == (4, 4)


def test_files_follow_each_other_and_a_missing_one_is_found(tmp_path: Path) -> None:
    written(tmp_path, 20, file_bytes=1000)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(files) > 5
    assert files[0] == "audit-000000000001.log"
    written(tmp_path, 20, file_bytes=1000)
    assert verify(tmp_path).last == 40
    (tmp_path / files[0]).unlink()
    assert verify(tmp_path).first > 1  # the oldest go when there are too many: that is said, not hidden
    (tmp_path / files[3]).unlink()
    with pytest.raises(MalformedData, match="missing"):
        verify(tmp_path)


def test_no_more_files_are_kept_than_wanted(tmp_path: Path) -> None:
    audit = Audit(tmp_path, file_bytes=300, files=3)
    for number in range(50):
        audit.write("layout", version=number)
    audit.close()
    assert len(list(tmp_path.glob("audit*"))) == 4
    assert verify(tmp_path).last == 50


@pytest.mark.parametrize("fails", ["open", "flock"])
def test_a_change_of_files_that_fails_once_is_made_by_the_next_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    audit = Audit(tmp_path, file_bytes=600)
    audit.write("first")
    works = os.open if fails == "open" else fcntl.flock

    def fail_once(*args: object) -> object:
        if audit.failures or (fails == "open" and args[0] != tmp_path / NAME):
            return works(*args)  # type: ignore[arg-type]
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(f"cluster.trust.audit.{'os' if fails == 'open' else 'fcntl'}.{fails}", fail_once)
    for number in range(10):
        audit.write("line", number=number)
    audit.close()
    assert audit.failures == 1
    assert verify(tmp_path).lines == 10  # all but the one that was said to have failed


@pytest.mark.parametrize("damage", [b"\0{", b"\xff", b"[]"])
def test_a_damaged_log_is_said_with_what_to_do(tmp_path: Path, damage: bytes) -> None:
    lines = written(tmp_path)
    (tmp_path / NAME).write_bytes(b"".join(lines[:-1]) + damage + lines[-1][len(damage) :])
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=f"damaged: `pixiu audit verify {tmp_path}` .* move the folder away"):
            Audit(tmp_path)


def test_one_folder_has_one_writer(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    with pytest.raises(ConfigurationError, match="another process writes the audit log"):
        Audit(tmp_path)
    audit.close()
    with pytest.raises(ConfigurationError, match="cannot be kept in"):
        Audit(tmp_path / NAME / "below")


def test_what_anybody_can_cause_is_counted_and_not_repeated(tmp_path: Path) -> None:
    told: list[str] = []
    audit = Audit(tmp_path, tell=lambda kind, _fields: told.append(kind))
    for _ in range(100_000):
        audit.write_limited("refused", "/pixiu.v1.Pi/Exchange nobody", method="/pixiu.v1.Pi/Exchange", caller="nobody")
    audit.write_limited("refused", "another", method="/pixiu.v1.Xiu/Store", caller="nobody")
    audit.close()
    assert 2 <= len(told) < 100
    assert verify(tmp_path / "refusals.log").lines == len(told)


def test_the_bound_of_what_anybody_can_cause_holds_for_any_number_of_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("cluster.trust.audit.time.monotonic", lambda: now)
    audit = Audit(tmp_path, file_bytes=300_000, files=3)
    audit.write("kicked", user="eve")
    for _second in range(3):
        for _ in range(3):
            for number in range(5 * MAX_KEYS):
                audit.write_limited("login_refused", f"2001:db8:{number:x}::/64", address=f"2001:db8:{number:x}::1")
        now += LIMITED_S
    lines = [
        json.loads(line)
        for path in sorted(tmp_path.glob("refusals*"), key=lambda path: (path.name == "refusals.log", path.name))
        for line in path.read_bytes().splitlines()
    ]
    assert audit.refusals.head[0] <= 3 * (MAX_KEYS + 1)
    assert sum(line.get("left_out", 0) for line in lines) > 5 * MAX_KEYS
    assert list(tmp_path.glob("refusals-*.log"))  # theirs were rolled over
    audit.close()
    assert [json.loads(line)["kind"] for line in (tmp_path / NAME).read_bytes().splitlines()] == ["kicked"]
    assert (verify(tmp_path).lines, len(audit._limited) <= MAX_KEYS + 1) == (1, True)
    path = tmp_path / "refusals.log"
    path.write_bytes(path.read_bytes().replace(b"2001:db8", b"2001:db9", 1))
    with pytest.raises(MalformedData, match=r"refusals.log:1: was changed"):
        verify(tmp_path)


@pytest.mark.parametrize("fields", [{"token": "x"}, {"what": {"password": "x"}}, {"what": b"payload"}, {"hash": "x"}])
def test_a_secret_or_payload_is_a_bug(tmp_path: Path, fields: dict[str, object]) -> None:
    audit = Audit(tmp_path)
    with pytest.raises(AssertionError):
        audit.write("login", **fields)
    audit.close()


async def test_in_an_event_loop_lines_are_synced_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    audit = Audit(tmp_path)
    monkeypatch.setattr("cluster.trust.audit.os.fsync", synced.append)
    for _ in range(1000):
        audit.write("login", user="7")
    await audit.flush()
    assert 1 <= len(synced) <= 2
    assert verify(tmp_path).lines == 1000
    audit.close()


def test_without_a_folder_lines_go_to_the_log_only() -> None:
    told: list[object] = []
    Audit(None, tell=lambda kind, fields: told.append((kind, dict(fields)))).write("drain", by="ann")
    assert told == [("drain", {"by": "ann"})]


def test_the_command_says_the_last_hash_or_what_is_wrong(tmp_path: Path) -> None:
    lines = written(tmp_path)
    good = CliRunner().invoke(audit_command, ["verify", str(tmp_path), "--json"])
    assert (good.exit_code, json.loads(good.stdout)["head"]) == (0, json.loads(lines[-1])["hash"])
    assert json.loads(lines[-1])["hash"] in CliRunner().invoke(audit_command, ["verify", str(tmp_path / NAME)]).stdout
    (tmp_path / NAME).write_bytes(b"".join(lines[:2] + lines[3:]))
    bad = CliRunner().invoke(audit_command, ["verify", str(tmp_path)])
    assert (bad.exit_code, "lines between are missing" in bad.stderr) == (1, True)
    assert CliRunner().invoke(audit_command, ["verify", str(tmp_path / "nowhere")]).exit_code == 2


def test_a_folder_without_a_log_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is it the folder of an audit log"):
        verify(tmp_path)

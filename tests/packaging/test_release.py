"""What `make release` makes of a commit, a changelog and pip's report; its signature."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pixiu.version import __version__
from scripts.release import NAMESPACE, NotReady, commit_of, differing, notes_of, sign, sums_of, write_sums
from scripts.sbom import EXTRAS, bom_of
from scripts.wheels import ROOT

CHANGELOG = """# Changelog

## 0.2.0 (2027-01-02)

### Security

- A hole is closed.

### Renamed and removed

- `old` is `new`.

### Upgrading

- Protocol version 2.

## 0.1.0 (2026-12-01)

The first one.

### Rooms

- Rooms.
"""
SIGNER = "release"


def test_the_notes_are_one_version_and_begin_with_what_an_upgrade_needs() -> None:
    notes = notes_of(CHANGELOG, "0.2.0")
    assert [line for line in notes.splitlines() if line.startswith("#")] == [
        "# Pixiu 0.2.0 (2027-01-02)", "### Upgrading", "### Renamed and removed", "### Security",
    ]  # fmt: skip
    assert notes_of(CHANGELOG, "0.1.0").startswith("# Pixiu 0.1.0 (2026-12-01)\n\nThe first one.\n\n### Rooms\n")
    assert "### Mail\n\n- More." in notes_of(CHANGELOG, "0.1.0", "## 0.1.0 (today)\n\n### Mail\n\n- More.\n")
    with pytest.raises(NotReady, match=r"no section 0\.2: `make changelog`"):
        notes_of(CHANGELOG, "0.2")


@pytest.fixture
def tagged(tmp_path: Path) -> Path:
    """A repository with two tags, of which one is wrong."""
    tree = tmp_path / "tree"
    (tree / "pixiu").mkdir(parents=True)
    (tree / "pixiu/version.py").write_text('__version__ = "0.2.0"\n')
    who = "-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "x"], ["tag", "v0.2.0"], ["tag", "v0.3.0"]):
        subprocess.run(["git", *words], cwd=tree, check=True)
    return tree


@pytest.mark.process
def test_a_tag_is_that_of_its_version(tagged: Path) -> None:
    found = commit_of("v0.2.0", tagged)
    assert (found.version, found.digest) == ("0.2.0", commit_of("HEAD", tagged).digest)
    with pytest.raises(NotReady, match=r"v0\.3\.0 is a tag of version 0\.2\.0"):
        commit_of("v0.3.0", tagged)
    with pytest.raises(NotReady, match="there is no commit v9"):
        commit_of("v9", tagged)


def test_builds_that_differ_are_named(tmp_path: Path) -> None:
    for name, files in {"one": {"a": b"1", "b": b"2"}, "other": {"a": b"1", "b": b"3", "c": b""}}.items():
        (tmp_path / name).mkdir()
        for file, data in files.items():
            (tmp_path / name / file).write_bytes(data)
    one, other = (sums_of(tmp_path / name) for name in ("one", "other"))
    assert (differing(one, other), differing(one, one)) == (["b", "c"], [])


@pytest.mark.process
@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_the_digests_are_signed_and_checked_as_the_page_says(tmp_path: Path) -> None:
    key, dist = tmp_path / "key", tmp_path / "dist"
    dist.mkdir()
    (dist / "a.whl").write_bytes(b"a")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    sign(write_sums(dist), key)
    (dist / "signers").write_text(f"{SIGNER} {key.with_suffix('.pub').read_text()}")
    page = (ROOT / "RELEASING.md").read_text()
    verify, check = (line for line in page.splitlines() if line.startswith(("ssh-keygen -Y verify", "sha256sum")))
    assert f"-n {NAMESPACE} " in verify

    def passes(command: str) -> bool:
        return subprocess.run(command, shell=True, cwd=dist, capture_output=True, check=False).returncode == 0

    assert (passes(verify), passes(check)) == (True, True)
    (dist / "a.whl").write_bytes(b"b")
    assert (passes(verify), passes(check)) == (True, False), "another file"
    write_sums(dist)
    assert (passes(verify), passes(check)) == (False, True), "other digests"
    with pytest.raises(NotReady, match="cannot sign"):
        sign(dist / "SHA256SUMS", dist / "a.whl")


def installed(name: str, needs: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """A distribution in pip's report."""
    archive = {"archive_info": {"hashes": {"sha256": name}}, "url": "https://index.example/x"}
    return {"metadata": {"name": name, "version": "1", "requires_dist": list(needs), **more}, "download_info": archive}


def test_the_sbom_has_what_pip_would_install_with_licences_digests_and_needs() -> None:
    environment = {"python_version": "3.11", "sys_platform": "linux", "platform_machine": "x86_64"}
    report: dict[str, Any] = {
        "environment": environment,
        "install": [
            installed("Typing_Extensions", license_expression="PSF-2.0"),
            installed("aiohttp", ("typing-extensions>=4; python_version < '99'", "absent; extra == 'speed'"), license="Apache 2"),
            installed("pixiu-sdk", classifier=["License :: OSI Approved :: Apache Software License"]),
            installed("pixiu-cluster", ("pixiu-sdk==1", "aiohttp>=3; extra == 'server'", "pyspark; extra == 'spark'")),
        ],
    }
    found = bom_of(report, "c0ffee", 1_800_000_000)
    assert found == bom_of({**report, "install": report["install"][::-1]}, "c0ffee", 1_800_000_000), "its order follows from names"
    assert found["metadata"]["component"]["purl"] == "pkg:pypi/pixiu-cluster@1"
    assert found["metadata"]["timestamp"] == "2027-01-15T08:00:00+00:00"
    components = {each["name"]: each for each in found["components"]}
    assert list(components) == ["aiohttp", "pixiu-sdk", "typing-extensions"]
    assert components["typing-extensions"]["licenses"] == [{"expression": "PSF-2.0"}]
    assert components["aiohttp"]["licenses"] == [{"license": {"name": "Apache 2"}}]
    assert components["pixiu-sdk"]["licenses"] == [{"license": {"name": "Apache Software License"}}]
    assert components["aiohttp"]["hashes"] == [{"alg": "SHA-256", "content": "aiohttp"}]
    needs = {each["ref"].split("/")[1]: [name.split("/")[1] for name in each["dependsOn"]] for each in found["dependencies"]}
    assert needs == {
        "aiohttp@1": ["typing-extensions@1"], "pixiu-cluster@1": ["aiohttp@1", "pixiu-sdk@1"], "pixiu-sdk@1": [],
        "typing-extensions@1": [],
    }  # fmt: skip
    assert "index.example" not in str(found), "where pip found it says nothing of what it is"


def test_the_sbom_is_of_extras_that_there_are() -> None:
    text = (ROOT / "setup.cfg").read_text()
    assert all(f"\n{extra} =\n" in text for extra in EXTRAS.split(","))
    assert __version__ in text

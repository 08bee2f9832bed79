"""Builds everything of a release from a commit, twice, and compares what came out.

    python -m scripts.release v0.1.0 --key ~/.ssh/release     `make release TAG=v0.1.0 KEY=~/.ssh/release`
    python -m scripts.release                                 a rehearsal, from HEAD

    dist/v0.1.0/pixiu_sdk-0.1.0-py3-none-any.whl
                pixiu_cluster-0.1.0-py3-none-any.whl
                pixiu_cluster-0.1.0-cp311-cp311-linux_x86_64.whl    the same with compiled modules, for this Python and machine
                pixiu-0.1.0.cdx.json                                what a server consists of (CycloneDX)
                RELEASE_NOTES.md                                    what to know before an upgrade, and the changelog
                SHA256SUMS, SHA256SUMS.sig                          signed by an SSH key: `ssh-keygen -Y verify`

What is built follows from the commit, `constraints.txt`, Python and the C compiler alone, wherever and whenever that is.

Source: RELEASING.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from scripts.sbom import EXTRAS, bom_of
from scripts.wheels import ROOT, run

NAMESPACE: Final = "file"
"""Of the signature, as `ssh-keygen` recommends it for files."""
SUMS: Final = "SHA256SUMS"
NOTES: Final = "RELEASE_NOTES.md"
FIRST: Final = ("Upgrading", "Renamed and removed")
"""Topics of the changelog that the notes begin with."""
PLAIN: Final = MappingProxyType({"PIXIU_COMPILE": "0"})
UMASK: Final = 0o022
"""A wheel has the modes of its files."""
VALIDATE: Final = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(sys.stdin.read()):
    raise SystemExit(f"the SBOM is no CycloneDX: {error}")
"""


class Commit(NamedTuple):
    """What is released."""

    ref: str
    digest: str
    epoch_s: int
    """Time of the commit, Unix seconds: that of every file in a wheel."""
    version: str


class NotReady(Exception):
    """What keeps a commit from being released, and what to do."""


def commit_of(ref: str, tree: Path = ROOT) -> Commit:
    """Find a commit. Raises NotReady for a tag that is not the version's."""
    try:
        digest = run("git", "rev-parse", "--verify", f"{ref}^{{commit}}", cwd=tree).strip()
    except RuntimeError:
        raise NotReady(f"there is no commit {ref}: `git tag` lists the tags, `git fetch --tags` gets them") from None
    found = re.search(r'__version__ = "(.+)"', run("git", "show", f"{digest}:pixiu/version.py", cwd=tree))
    version = found[1] if found else ""
    if is_tag(ref) and ref != f"v{version}":
        raise NotReady(f"{ref} is a tag of version {version or 'none'}: write the version where RELEASING.md says, then tag again")
    return Commit(ref, digest, int(run("git", "show", "-s", "--format=%ct", digest, cwd=tree)), version)


def is_tag(ref: str) -> bool:
    """Return True if this names a release, and no rehearsal."""
    return re.fullmatch(r"v\d.*", ref) is not None


def notes_of(changelog: str, version: str, more: str = "") -> str:
    """Make the notes of a version: its section of the changelog, with what to know before an upgrade first. Raises NotReady.

    more: of a rehearsal, what is not in the changelog yet.
    """
    found = re.search(rf"^## {re.escape(version)}(?= |$).*?(?=^## |\Z)", changelog, re.DOTALL | re.MULTILINE)
    if found is None:
        raise NotReady(f"CHANGELOG.md has no section {version}: `make changelog` makes it")
    head, *parts = re.split(r"(?m)^(?=### )", found[0])
    if more:
        parts += re.split(r"(?m)^(?=### )", more)[1:]
    first = [part for name in FIRST for part in parts if part.startswith(f"### {name}\n")]
    ordered = [head.replace("## ", "# Pixiu ", 1), *first, *(part for part in parts if part not in first)]
    return "\n\n".join(part.strip() for part in ordered) + "\n"


def fragments(tree: Path) -> list[Path]:
    """Return the fragments that are not in the changelog yet."""
    return sorted(path for path in (tree / "changelog.d").glob("*.md") if path.name != "README.md")


def environment_of(commit: Commit, tree: Path, *, compiled: bool) -> dict[str, str]:
    """Return the variables under which a build depends on neither its time nor its folder."""
    flags = f"-g0 -ffile-prefix-map={tree}=. -ffile-prefix-map={tree.resolve()}=."
    return {
        "SOURCE_DATE_EPOCH": str(max(commit.epoch_s, 315_532_800)),  # a ZIP begins in 1980
        "PYTHONHASHSEED": "0", "PIXIU_COMPILE": str(int(compiled)), "CFLAGS": flags, "LC_ALL": "C.UTF-8", "TZ": "UTC",
    }  # fmt: skip


def pip(python: Path, *words: str | Path) -> list[str | Path]:
    """Return a command of an environment's own pip."""
    return [python, "-m", "pip", *words, "-q", "--disable-pip-version-check"]


def make_tools(folder: Path, tree: Path) -> Path:
    """Make an environment with what builds a release (the extra `release`), and with what the servers need: the compiler looks at
    its types. Returns its Python."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    constraints = "-c", tree / "constraints.txt"
    run(*pip(python, "install", *constraints, "pip", "setuptools"))
    run(*pip(python, "install", *constraints, "--no-build-isolation", tree / "pixiu", f"{tree}[{EXTRAS},release]"), also=PLAIN)
    run(*pip(python, "uninstall", "-y", "pixiu-sdk", "pixiu-cluster"))
    return python


def build(commit: Commit, python: Path, folder: Path, out: Path, *, compiled: bool) -> None:
    """Build the wheels of a commit into `out`. folder: where its tree is made, which must not exist."""
    out.mkdir(parents=True)
    for native in (False, True) if compiled else (False,):
        tree = folder / ("native" if native else "plain")
        run("git", "clone", "-q", ROOT, tree)
        run("git", "checkout", "-q", "--detach", commit.digest, cwd=tree)
        for part in (tree,) if native else (tree / "pixiu", tree):
            run(
                *pip(python, "wheel", "--no-deps", "--no-build-isolation", "-w", out, part),
                also=environment_of(commit, tree, compiled=native),
            )


def sums_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a folder, but of the sums themselves."""
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith(SUMS))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def write_sums(folder: Path) -> Path:
    """Write the digests as `sha256sum --check` reads them."""
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sums_of(folder).items()))
    return folder / SUMS


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the names of files that two builds do not have in common, bit by bit."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def sign(sums: Path, key: Path) -> None:
    """Sign the digests. key: an SSH key, or the public half of one that an agent has. Raises NotReady."""
    command: list[str | Path] = ["ssh-keygen", "-Y", "sign", "-q", "-f", key, "-n", NAMESPACE, sums]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotReady(f"{key} cannot sign: {done.stderr.strip() or 'is it an SSH key?'}")


def write_sbom(commit: Commit, python: Path, tree: Path, out: Path) -> None:
    """Write what the servers consist of, by what pip would install with constraints.txt."""
    wheels = next(out.glob("pixiu_sdk-*.whl")), f"{next(out.glob('pixiu_cluster-*-none-any.whl'))}[{EXTRAS}]"
    only = "--dry-run", "--ignore-installed", "--report", "-"
    report = json.loads(run(*pip(python, "install", *only, "-c", tree / "constraints.txt", *wheels)))
    text = json.dumps(bom_of(report, commit.digest, commit.epoch_s), indent=1, sort_keys=True) + "\n"
    run(python, "-c", VALIDATE, given=text)
    (out / f"pixiu-{commit.version}.cdx.json").write_text(text)


def release(commit: Commit, out: Path, key: Path | None, *, compiled: bool) -> None:
    """Build a release into `out`, which is replaced. Raises NotReady."""
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        folder = Path(name)
        tree = folder / "tree"
        run("git", "clone", "-q", ROOT, tree)
        run("git", "checkout", "-q", "--detach", commit.digest, cwd=tree)
        waiting, more = fragments(tree), ""
        if waiting and is_tag(commit.ref):
            raise NotReady(
                f"changelog.d has {len(waiting)} fragments: `make changelog` moves them to CHANGELOG.md; tag that commit"
            )
        if waiting:
            more = run(sys.executable, "-m", "towncrier", "build", "--draft", "--version", commit.version, cwd=tree)
        notes = notes_of((tree / "CHANGELOG.md").read_text(), commit.version, more)
        python = make_tools(folder / "tools", tree)
        builds = [folder / "once" / "dist", folder / "another" / "dist"]
        for place in builds:
            build(commit, python, place.parent, place, compiled=compiled)
        if wrong := differing(*(sums_of(place) for place in builds)):
            raise NotReady(f"two builds differ in {', '.join(wrong)}: find by diffoscope what depends on its time or folder")
        write_sbom(commit, python, tree, builds[0])
        (builds[0] / NOTES).write_text(notes)
        sums = write_sums(builds[0])
        if key is not None:
            sign(sums, key)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(builds[0], out)


def main(argv: Sequence[str] | None = None) -> int:
    """Build a release. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("ref", nargs="?", default="HEAD", metavar="TAG", help="the tag; without it a rehearsal from HEAD")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: dist/TAG")
    parser.add_argument("--key", type=Path, metavar="FILE", help="SSH key that signs, or its public half if an agent has it")
    parser.add_argument("--plain", action="store_true", help="without the compiled servers")
    wanted = parser.parse_args(argv)
    os.umask(UMASK)
    try:
        commit = commit_of(wanted.ref)
        out = wanted.out or ROOT / "dist" / (commit.ref if is_tag(commit.ref) else f"rehearsal-{commit.digest[:12]}")
        release(commit, out, wanted.key, compiled=not wanted.plain)
    except (NotReady, RuntimeError) as error:
        print(f"not released: {error}", file=sys.stderr)
        return 1
    print((out / SUMS).read_text(), end="")
    print(f"{out}: {commit.version}, commit {commit.digest}, built twice with the same digests")
    if wanted.key is None:
        print(f"not signed: give --key FILE, an SSH key whose public half users know, or sign {SUMS} yourself")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Play the script with four NSQ clients against a listener, and against a real nsqd, and print what works.

python -m tests.clients.nsq.matrix --listener 127.0.0.1:4150:4151 --peer
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from comparison.processes import free_port
from tests.clients.nsq.malformed import CASES, codes
from tests.clients.nsq.script import CHECKS

HERE = Path(__file__).resolve().parent
BUILT = Path(os.environ.get("PIXIU_CLIENTS", Path(tempfile.gettempdir()) / f"pixiu-clients-{os.getuid()}")) / "nsq"
"""Folder of what `--prepare` installs and builds."""
LIMIT_S = 120.0
PYTHON = str(BUILT / "venv/bin/python")
CLIENTS: Mapping[str, tuple[str, ...]] = {
    "pynsq": (PYTHON, str(HERE / "pynsq_client.py")),
    "ansq": (PYTHON, str(HERE / "ansq_client.py")),
    "nsqjs": ("node", str(BUILT / "nsqjs/driver.js")),
    "go-nsq": (str(BUILT / "gonsq/driver"),),
}
NSQ = "github.com/nsqio/nsq"
SERVICE = "github.com/judwhite/go-svc=github.com/mreiferson/go-svc@v1.2.2-0.20210815184239-7a96e00010f6"
"""The replacement that nsqd's own module names, which another module has to name itself."""


def prepare(*, peer: bool) -> None:
    """Install and build the clients, and nsqd."""
    BUILT.mkdir(parents=True, exist_ok=True)
    for name in ("nsqjs", "gonsq"):
        shutil.copytree(HERE / name, BUILT / name, dirs_exist_ok=True)
    commands: list[tuple[Path, tuple[str, ...]]] = [
        (BUILT, (sys.executable, "-m", "venv", "venv")),
        (BUILT, (PYTHON, "-m", "pip", "install", "--quiet", "pynsq==0.9.1", "ansq==0.3.0")),
        (BUILT / "nsqjs", ("npm", "install", "--silent")),
        (BUILT / "gonsq", ("go", "build", "-o", "driver", ".")),
    ]
    if peer:
        folder = BUILT / "nsqd"
        folder.mkdir(exist_ok=True)
        if not (folder / "go.mod").exists():
            commands.append((folder, ("go", "mod", "init", "peer")))
        commands += [
            (folder, ("go", "mod", "edit", f"-replace={SERVICE}")),
            (folder, ("go", "get", f"{NSQ}/apps/nsqd@v1.3.0", f"{NSQ}/apps/nsqlookupd@v1.3.0")),
            (folder, ("go", "build", "-o", ".", f"{NSQ}/apps/nsqd", f"{NSQ}/apps/nsqlookupd")),
        ]
    for folder, command in commands:
        subprocess.run(command, cwd=folder, check=True)


@contextlib.contextmanager
def nsqd() -> Iterator[tuple[str, str]]:
    """A real nsqd with its nsqlookupd: yields the addresses of nsqd's TCP and nsqlookupd's HTTP."""
    tcp, http, lookup_tcp, lookup_http = (f"127.0.0.1:{free_port()}" for _ in range(4))
    with tempfile.TemporaryDirectory() as data:
        started = []
        for command in (
            ("nsqlookupd", "-tcp-address", lookup_tcp, "-http-address", lookup_http),
            ("nsqd", "-tcp-address", tcp, "-http-address", http, "-lookupd-tcp-address", lookup_tcp, "-data-path", data,
             "-broadcast-address", "127.0.0.1"),
        ):  # fmt: skip
            path = str(BUILT / "nsqd" / command[0])
            started.append(subprocess.Popen((path, *command[1:]), stderr=subprocess.DEVNULL))
        try:
            yield tcp, lookup_http
        finally:
            for process in started[::-1]:
                process.terminate()
                process.wait(30)


def play(name: str, tcp: str, lookup: str, topic: str = "") -> Mapping[str, str]:
    """What one client found."""
    command = (*CLIENTS[name], tcp, lookup, topic or f"matrix-{secrets.token_hex(4)}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        found: Mapping[str, str] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
        return dict.fromkeys(CHECKS, f"failed: {type(error).__name__}")
    return found


def refusals(tcp: str) -> Mapping[str, list[str]]:
    """What each malformed command gets."""
    host, _, port = tcp.rpartition(":")
    return {name: codes(host, int(port), said) for name, said in CASES.items()}


def main() -> int:
    """Run everything; exit code 1 if something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listener", metavar="HOST:TCP:HTTP")
    parser.add_argument("--peer", action="store_true", help="play it against a real nsqd, too, and compare the errors")
    parser.add_argument("--prepare", action="store_true")
    wanted = parser.parse_args()
    if wanted.prepare:
        prepare(peer=wanted.peer)
    wrong, errors = False, {}
    with contextlib.ExitStack() as stack:
        servers = {}
        if wanted.listener:
            host, tcp, http = wanted.listener.split(":")
            servers["listener"] = f"{host}:{tcp}", f"{host}:{http}"
        if wanted.peer:
            servers["nsqd"] = stack.enter_context(nsqd())
        for server, (tcp, lookup) in servers.items():
            for name in CLIENTS:
                found = play(name, tcp, lookup)
                wrong |= any(found[check] != "ok" for check in CHECKS)
                print(f"{server:10}{name:8}" + "".join(f"{check} {found[check]:6}" for check in CHECKS), flush=True)
            errors[server] = refusals(tcp)
    for case in CASES:
        said = {server: " ".join(found[case]) for server, found in errors.items()}
        same = len(set(said.values())) == 1
        wrong |= not same
        print(f"{case:46}{next(iter(said.values())) if same else said}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())

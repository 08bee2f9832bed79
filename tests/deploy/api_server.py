"""A real API server of Kubernetes with its etcd, on loopback: what it says of an object that is not stored (`dryRun=All`)."""

from __future__ import annotations

import http.client
import json
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from comparison.processes import free_port
from tests.support.cluster import wait_for

SERVER, ETCD = shutil.which("kube-apiserver"), shutil.which("etcd")
TOKEN = "token-of-the-test"
STOP_S = 30.0


class Answer(NamedTuple):
    """Status, what it says, and its warnings."""

    status: int
    body: dict[str, Any]
    warnings: list[str]

    @property
    def refusal(self) -> str:
        """Why it was refused; empty: it was not."""
        return "" if self.status < 300 else str(self.body.get("message", self.status))


class ApiServer:
    """Calls to the server at a port, by its own certificate."""

    def __init__(self, port: int, certificate: Path) -> None:
        self._port, self._certificate = port, certificate

    @cached_property
    def _connection(self) -> http.client.HTTPSConnection:
        context = ssl.create_default_context(cafile=str(self._certificate))
        return http.client.HTTPSConnection("127.0.0.1", self._port, context=context, timeout=60)

    def call(self, method: str, path: str, body: Any = None) -> Answer:
        """Call it."""
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        self._connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = self._connection.getresponse()
        said, kind = answer.read(), answer.headers.get_content_type()
        found = json.loads(said) if kind == "application/json" else {"message": said.decode()}
        return Answer(answer.status, found, answer.headers.get_all("Warning") or [])

    def ready(self) -> bool:
        """Whether it serves."""
        if not self._certificate.exists():
            return False
        try:
            return self.call("GET", "/readyz").status == 200
        except (OSError, http.client.HTTPException):
            self.close()
            return False

    def close(self) -> None:
        """Forget the connection."""
        self.__dict__.pop("_connection", None)

    def tried(self, thing: dict[str, Any], namespace: str) -> Answer:
        """What it says of an object, strictly; nothing is stored."""
        kind, version = thing["kind"], thing["apiVersion"]
        folder = f"/apis/{version}" if "/" in version else f"/api/{version}"
        if folder not in self._resources:
            listed = self.call("GET", folder).body.get("resources", [])
            self._resources[folder] = {each["kind"]: each["name"] for each in listed if "/" not in each["name"]}
        name = self._resources[folder][kind]
        return self.call("POST", f"{folder}/namespaces/{namespace}/{name}?dryRun=All&fieldValidation=Strict", thing)

    @cached_property
    def _resources(self) -> dict[str, dict[str, str]]:
        return {}


@contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """Run both until the block ends."""
    assert SERVER is not None
    assert ETCD is not None
    key = rsa.generate_private_key(65537, 2048)
    (folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (folder / "tokens.csv").write_text(f"{TOKEN},test,1,system:masters\n")
    clients, peers, port = (free_port() for _ in range(3))
    etcd = f"http://127.0.0.1:{clients}"
    commands = [
        [
            *(ETCD, "--data-dir", str(folder / "etcd"), "--listen-client-urls", etcd, "--advertise-client-urls", etcd),
            *("--listen-peer-urls", f"http://127.0.0.1:{peers}"),
        ],
        [
            *(SERVER, "--etcd-servers", etcd, "--cert-dir", str(folder / "certificates"), "--secure-port", str(port)),
            *("--bind-address=127.0.0.1", "--service-cluster-ip-range=10.0.0.0/24", "--authorization-mode=AlwaysAllow"),
            *("--token-auth-file", str(folder / "tokens.csv"), "--service-account-issuer=https://test"),
            *("--service-account-key-file", str(folder / "key.pem"), "--service-account-signing-key-file", str(folder / "key.pem")),
        ],
    ]
    server = ApiServer(port, folder / "certificates/apiserver.crt")
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (folder / f"{Path(command[0]).name}.log").open("wb") as log:
                running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        wait_for(lambda: _lives(running, folder) and server.ready(), "the API server", pause_s=0.2)
        yield server
    finally:
        server.close()
        for process in reversed(running):
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)


def _lives(running: list[subprocess.Popen[bytes]], folder: Path) -> bool:
    ended = [process.args for process in running if process.poll() is not None]
    assert not ended, "".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
    return True

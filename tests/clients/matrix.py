"""Run drivers of stock clients against a broker, over every transport and version, and print what works.

python -m tests.clients.matrix --mosquitto
python -m tests.clients.matrix --tcp 127.0.0.1:1883 --tls 127.0.0.1:8883 --ca ca.pem --ws 127.0.0.1:8080 --json result.json
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import ipaddress
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from comparison.processes import free_port

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILT = Path(os.environ.get("PIXIU_CLIENTS", Path(tempfile.gettempdir()) / f"pixiu-clients-{os.getuid()}"))
"""Folder of what `--prepare` installs and builds."""
VERSIONS = ("3.1.1", "5")
TRANSPORTS = ("tcp", "tls", "ws", "wss")
MOST = ("tcp", "tls", "ws")
"""What most drivers have."""
LIMIT_S = 240.0
"""Longest time of one driver, seconds."""
Found = dict[str, str]


@dataclass(frozen=True)
class Driver:
    """A driver: its command, what prepares it, and the transports that the client has."""

    name: str
    command: tuple[str, ...]
    prepare: tuple[tuple[str, ...], ...] = ()
    transports: tuple[str, ...] = MOST
    folder: str = ""
    """Sources of the driver, copied to `BUILT` before it is built."""
    path: str = ""
    """Further folder of Python packages."""


def _python(name: str) -> tuple[str, ...]:
    return sys.executable, "-m", f"tests.clients.{name}"


def _pip(target: Path, *packages: str) -> tuple[str, ...]:
    return sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target), "--no-deps", *packages


_NPM = ("npm", "install", "--silent")
_CLASSES = f"{BUILT}/hivemq/target/classes{os.pathsep}{BUILT}/hivemq/lib/*"
DRIVERS = {
    driver.name: driver
    for driver in (
        Driver("paho", _python("paho_client")),
        Driver("mosquitto", _python("mosquitto_client"), transports=("tcp", "tls")),
        Driver("aiomqtt", _python("aiomqtt_client"), (_pip(BUILT / "aiomqtt", "aiomqtt>=2.4,<3"),), path=f"{BUILT}/aiomqtt"),
        Driver(
            "gmqtt", _python("gmqtt_client"), (_pip(BUILT / "gmqtt", "gmqtt>=0.7,<0.9"),), ("tcp", "tls"), path=f"{BUILT}/gmqtt"
        ),
        Driver("mqttjs", ("node", f"{BUILT}/mqttjs/driver.js"), (_NPM,), TRANSPORTS, folder="mqttjs"),
        Driver("browser", ("node", f"{BUILT}/mqttjs/browser.js"), (_NPM,), ("ws", "wss"), folder="mqttjs"),
        Driver("golang", (f"{BUILT}/golang/driver",), (("go", "build", "-o", "driver", "."),), folder="golang"),
        Driver(
            "rumqttc", (f"{BUILT}/rumqttc/target/debug/driver",), (("cargo", "build", "--quiet"),), folder="rumqttc"
        ),
        Driver(
            "hivemq",
            ("java", "-cp", _CLASSES, "Driver"),
            (("mvn", "-q", "compile", "dependency:copy-dependencies", "-DoutputDirectory=lib"),),
            folder="hivemq",
        ),
    )
}  # fmt: skip


def prepare(driver: Driver) -> None:
    """Install and build what a driver needs."""
    folder = BUILT / driver.folder if driver.folder else BUILT
    if driver.folder:
        shutil.copytree(HERE / driver.folder, folder, dirs_exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    for command in driver.prepare:
        subprocess.run(command, cwd=folder, check=True)
    if driver.path:
        for ours in ("tests", "examples"):  # gmqtt's package has folders of these names
            shutil.rmtree(Path(driver.path) / ours, ignore_errors=True)


def run(driver: Driver, address: tuple[str, int], transport: str, version: str, ca: str) -> Found:
    """Run a driver; what it prints, or why it prints nothing."""
    words = [*driver.command, address[0], str(address[1]), transport, version, *([ca] if ca else [])]
    path = os.pathsep.join(filter(None, (str(ROOT), driver.path)))
    environment = {**os.environ, "PYTHONPATH": path}
    try:
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except FileNotFoundError:
        return {"driver": f"{words[0]} is not there: run with --prepare"}
    except subprocess.TimeoutExpired:
        return {"driver": f"no answer in {LIMIT_S:.0f} s"}
    try:
        found: Found = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"driver": (done.stderr.strip().splitlines() or ["it printed nothing"])[-1][:200]}
    return found


def certificates(folder: Path) -> tuple[Path, Path, Path]:
    """An authority, a certificate of it for 127.0.0.1, and the key of that."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    now, hour, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(hours=1), datetime.timedelta(days=1)
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer, subject = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("authority", "localhost"))

    def signed(name: x509.Name, public: ec.EllipticCurvePublicKey, *extensions: x509.ExtensionType) -> bytes:
        builder = x509.CertificateBuilder(issuer, name, public, x509.random_serial_number(), now - hour, now + day)
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    authority, certificate, secret = (folder / name for name in ("authority.pem", "certificate.pem", "key.pem"))
    authority.write_bytes(signed(issuer, authority_key.public_key(), x509.BasicConstraints(ca=True, path_length=None)))
    certificate.write_bytes(signed(subject, key.public_key(), names))
    form = serialization.PrivateFormat.TraditionalOpenSSL
    secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return authority, certificate, secret


@contextlib.contextmanager
def mosquitto(transports: tuple[str, ...] = TRANSPORTS) -> Iterator[tuple[dict[str, tuple[str, int]], str]]:
    """A Mosquitto: transport → address, and the authority of its certificate."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        ports = {transport: free_port() for transport in transports}
        authority, certificate, secret = certificates(folder)
        lines = ["per_listener_settings false", "allow_anonymous true", "user root", "max_queued_messages 10000"]
        for transport, port in ports.items():
            lines.append(f"listener {port} 127.0.0.1")
            lines += ["protocol websockets"] if transport in ("ws", "wss") else []
            lines += [f"certfile {certificate}", f"keyfile {secret}"] if transport in ("tls", "wss") else []
        (folder / "mosquitto.conf").write_text("\n".join(lines) + "\n")
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(["mosquitto", "-c", str(folder / "mosquitto.conf")], stdout=log, stderr=log)
        try:
            for port in ports.values():
                _wait_for_port(port, process, folder / "log")
            yield {transport: ("127.0.0.1", port) for transport, port in ports.items()}, str(authority)
        finally:
            process.terminate()
            process.wait(10)


def _wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(500):
        if process.poll() is not None:
            raise RuntimeError(log.read_text())
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"mosquitto does not listen on {port}")


def table(results: dict[tuple[str, str, str], Found]) -> str:
    """The matrix as text: a row for each client, transport and version."""
    checks = ("connect", "qos0", "qos1", "qos2", "wildcard", "retained", "will", "shared", "resume")
    lines = [f"{'client':10} {'over':4} {'MQTT':5} " + " ".join(f"{check:8}" for check in checks)]
    details: list[str] = []
    for (name, transport, version), found in results.items():
        cells = ["ok" if found.get(check) == "ok" else "-" if "driver" in found else "FAILED" for check in checks]
        lines.append(f"{name:10} {transport:4} {version:5} " + " ".join(f"{cell:8}" for cell in cells))
        details += [f"{name} {transport} {version} {check}: {text}" for check, text in found.items() if text != "ok"]
    return "\n".join([*lines, "", *details]).rstrip()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def main() -> int:
    """Run what the command line names. Returns 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default=",".join(DRIVERS))
    parser.add_argument("--prepare", action="store_true", help=f"install and build drivers in {BUILT} first")
    parser.add_argument("--mosquitto", action="store_true", help="start a Mosquitto and use it")
    for transport in TRANSPORTS:
        parser.add_argument(f"--{transport}", type=_address, metavar="HOST:PORT")
    parser.add_argument("--ca", default="", help="authority of the broker's certificate, a PEM file")
    parser.add_argument("--versions", default=",".join(VERSIONS))
    parser.add_argument("--json", help="write the results to this file as well")
    arguments = parser.parse_args()
    drivers = [DRIVERS[name] for name in arguments.clients.split(",")]
    if arguments.prepare:
        for driver in drivers:
            prepare(driver)
    results: dict[tuple[str, str, str], Found] = {}
    with contextlib.ExitStack() as stack:
        addresses = {transport: getattr(arguments, transport) for transport in TRANSPORTS if getattr(arguments, transport)}
        ca = arguments.ca
        if arguments.mosquitto:
            addresses, ca = stack.enter_context(mosquitto())
        for driver in drivers:
            for transport in (transport for transport in addresses if transport in driver.transports):
                for version in arguments.versions.split(","):
                    authority = ca if transport in ("tls", "wss") else ""
                    results[driver.name, transport, version] = run(driver, addresses[transport], transport, version, authority)
    print(table(results))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({" ".join(key): found for key, found in results.items()}, indent=1) + "\n")
    return int(any(text != "ok" for found in results.values() for text in found.values()))


if __name__ == "__main__":
    sys.exit(main())

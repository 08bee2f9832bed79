"""What the servers consist of, in CycloneDX 1.6, of the report of `pip install --dry-run --report`. Pure.

Nothing in it depends on the time or the machine, but for the files that pip would take for this Python and platform.

Source: RELEASING.md; https://cyclonedx.org/docs/1.6/json, https://pip.pypa.io/en/stable/reference/installation-report.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MAIN: Final = "pixiu-cluster"
EXTRAS: Final = "server,bridge,export,store"
"""What an image for all roles has. Spark and the embedded ZooKeeper of one machine are not in it."""
CLASSIFIER: Final = "License :: OSI Approved :: "


def bom_of(report: Mapping[str, Any], commit: str, epoch_s: int) -> dict[str, Any]:
    """Make the SBOM of what pip would install. commit, epoch_s: of the release, the time in Unix seconds."""
    found: dict[str, Any] = {canonicalize_name(each["metadata"]["name"]): each for each in report["install"]}
    components = {name: _component(name, each) for name, each in sorted(found.items())}
    refs = {name: component["bom-ref"] for name, component in components.items()}
    depends = [{"ref": refs[name], "dependsOn": sorted({refs[other] for other in _needs(found[name], found)})} for name in refs]
    where = report["environment"]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'pixiu:{commit}')}",
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch_s, UTC).isoformat(),
            "component": components[MAIN] | {"type": "application"},
            "properties": [
                {"name": "pixiu:commit", "value": commit},
                {"name": "pixiu:extras", "value": EXTRAS},
                {"name": "pixiu:python", "value": str(where["python_version"])},
                {"name": "pixiu:platform", "value": f"{where['sys_platform']} {where['platform_machine']}"},
            ],
        },
        "components": [component for name, component in components.items() if name != MAIN],
        "dependencies": depends,
    }


def _component(name: str, each: Mapping[str, Any]) -> dict[str, Any]:
    metadata = each["metadata"]
    purl = f"pkg:pypi/{name}@{metadata['version']}"
    hashes = each.get("download_info", {}).get("archive_info", {}).get("hashes", {})
    component: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": metadata["version"], "purl": purl}
    if "sha256" in hashes:
        component["hashes"] = [{"alg": "SHA-256", "content": hashes["sha256"]}]
    if licences := _licences(metadata):
        component["licenses"] = licences
    return component


def _licences(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The licence as its authors say it: an expression of SPDX, else names."""
    if expression := metadata.get("license_expression"):
        return [{"expression": expression}]
    named = [each.removeprefix(CLASSIFIER) for each in metadata.get("classifier", ()) if each.startswith(CLASSIFIER)]
    short = [text] if (text := str(metadata.get("license") or "")) and "\n" not in text and len(text) <= 64 else []
    return [{"license": {"name": each}} for each in sorted(named or short)]


def _needs(each: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a distribution needs of what is there, with the extras for which it was asked."""
    extras = ["", *EXTRAS.split(","), *each.get("requested_extras", ())]
    for text in each["metadata"].get("requires_dist", ()):
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        marker = requirement.marker
        if name in found and (marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)):
            yield name

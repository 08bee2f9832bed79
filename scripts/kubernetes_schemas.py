"""Makes the schemas that kubeconform reads from the OpenAPI description of Kubernetes, for machines that reach no others.

    python scripts/kubernetes_schemas.py SWAGGER FOLDER   SWAGGER: api/openapi-spec/swagger.json of the Go module k8s.io/kubernetes

A file for each kind, such as statefulset-apps-v1.json, in which no field is allowed that the description does not have.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

KINDS: Final = "x-kubernetes-group-version-kind"
QUANTITY: Final = "io.k8s.apimachinery.pkg.api.resource.Quantity"
EITHER: Final = "io.k8s.apimachinery.pkg.util.intstr.IntOrString"
"""Described as strings, and written as numbers too."""


def strict(value: Any) -> Any:
    """Return a schema that refuses unknown fields, with references into the file of all definitions."""
    if isinstance(value, list):
        return [strict(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {key: strict(each) for key, each in value.items() if key != "description"}
    if isinstance(reference := found.get("$ref"), str):
        return {"$ref": reference.replace("#/definitions/", "_definitions.json#/definitions/")}
    if "properties" in found and "additionalProperties" not in found and isinstance(found["properties"], dict):
        found["additionalProperties"] = False
    return found


def main() -> None:
    """Write the schemas."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("swagger", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    definitions = {name: strict(value) for name, value in json.loads(arguments.swagger.read_text())["definitions"].items()}
    for name in (QUANTITY, EITHER):
        definitions[name] = {"type": ["string", "number"]}
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (arguments.folder / "_definitions.json").write_text(json.dumps({"definitions": definitions}))
    written = 0
    for name, value in definitions.items():
        for kind in value.get(KINDS, ()) if isinstance(value, dict) else ():
            group = kind["group"].split(".")[0]
            file = "-".join(part for part in (kind["kind"], group, kind["version"]) if part).lower()
            (arguments.folder / f"{file}.json").write_text(json.dumps({"$ref": f"_definitions.json#/definitions/{name}"}))
            written += 1
    print(f"{written} kinds in {arguments.folder}")


if __name__ == "__main__":
    main()

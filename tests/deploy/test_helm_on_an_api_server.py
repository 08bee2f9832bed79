"""The Helm chart at a real API server of Kubernetes, with the default values and with each option changed: a dry run.

Needs `kube-apiserver`, `etcd` and `helm`; docs/deployment.md has how they are built.
"""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import pytest

from tests.deploy.api_server import ETCD, SERVER, ApiServer, api_server
from tests.deploy.test_helm_chart import CASES, CHART, HELM, KUBERNETES, values

yaml = pytest.importorskip("yaml")
NAMESPACE: Final = "test"
FOREIGN: Final = "ServiceMonitor"
"""A kind of Prometheus' operator, whose definition the server does not have."""
RESOURCES: Final = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}}
PEERS: Final = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "apps"}}}]
HOSTS: Final = "zk-0.zk:2181"
VOLUME: Final = [{"name": "more", "emptyDir": {}}]
OPTIONS: Final[dict[str, Any]] = {
    "image.repository": "registry.example:5000/pixiu",
    "image.tag": "0.1.0-1",
    "image.pullPolicy": "Always",
    "image.pullSecrets": [{"name": "pull"}],
    "registry.hosts": HOSTS,
    "registry.root": "/other",
    "registry.tls": True,
    "zookeeper.image": "zookeeper:3.9.3",
    "zookeeper.replicas": 1,
    "zookeeper.storage": "1Gi",
    "zookeeper.storageClass": "fast",
    "zookeeper.heapMiB": 256,
    "zookeeper.resources": RESOURCES,
    "secrets.tls": "other",
    "secrets.keys": "other",
    "secrets.tickets": "tickets",
    "secrets.registry": "registry",
    "secrets.access": "",
    "secrets.clients": "",
    "insecure": True,
    "cluster": {"weighted_routing": True, "big_rooms": [1000, 1010]},
    "storageClass": "fast",
    "ports.cluster": 7100,
    "ports.http": 7101,
    "ports.clients": 7102,
    "ports.streams": 7103,
    "ports.mqtt": 8883,
    "ports.websocket": 8083,
    "ports.api": 8084,
    "services.gateway": {"type": "LoadBalancer", "annotations": {"example.com/of": "gateways"}},
    "services.proxy": {"type": "NodePort", "annotations": {}},
    "drainSeconds": 60,
    "forgetSeconds": 0,
    "podDisruptionBudget": False,
    "serviceAccount": {"create": False, "name": "mine"},
    "serviceAccount.annotations": {"example.com/role": "pixiu"},
    "nodeSelector": {"disk": "nvme"},
    "tolerations": [{"key": "pixiu", "operator": "Exists", "effect": "NoSchedule"}],
    "spread": "required",
    "topologyKey": "topology.kubernetes.io/zone",
    "podAnnotations": {"example.com/of": "pixiu"},
    "podLabels": {"team": "chat"},
    "priorityClassName": "high",
    "networkPolicy.enabled": False,
    "networkPolicy.clientsFrom": PEERS,
    "networkPolicy.metricsFrom": PEERS,
    "serviceMonitor.enabled": True,
    "layout": False,
    "doubling": "broker",
    "restart": "2026-11-30",
    "jobs.timeoutSeconds": 60,
    "jobs.resources": RESOURCES,
    "roles.broker.partitions": 2,
    "roles.gateway.replicas": 3,
    "roles.bridge.replicas": 2,
    "roles.gateway.options": {"proxy_networks": "10.0.0.0/8"},
    "roles.broker.storage": "1Gi",
    "roles.xiu.storage": "",
    "roles.xiu.sharedMemory": "128Mi",
    "roles.pi.resources": RESOURCES,
    "roles.bridge": {"replicas": 1, "extraVolumes": VOLUME, "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}]},
}
"""A value for each option that the default is not."""
NEEDS: Final = {"registry.tls": ("--set", f"registry.hosts={HOSTS}"), "jobs.timeoutSeconds": ("--set", "doubling=broker")}
"""What an option is of no use without."""
ALONE: Final = {"serviceMonitor.interval", "serviceMonitor.labels"}
"""Options of the kind that the server does not know."""
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not (SERVER and ETCD and HELM), reason="no kube-apiserver, etcd or helm"),
]


@cache
def rendered(*words: str) -> list[dict[str, Any]]:
    """The objects that helm makes."""
    command = [str(HELM), "template", "px", str(CHART), "--namespace", NAMESPACE, "--kube-version", KUBERNETES, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each and each["kind"] != FOREIGN]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("kubernetes")) as found:
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        assert found.call("POST", "/api/v1/namespaces", namespace).refusal == ""
        yield found


def said(server: ApiServer, things: list[dict[str, Any]]) -> list[str]:
    """Refusals and warnings."""
    found = []
    for thing in things:
        answer = server.tried(thing, NAMESPACE)
        found += [f"{thing['kind']} {thing['metadata']['name']}: {text}" for text in (answer.refusal, *answer.warnings) if text]
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_server_takes_every_object(server: ApiServer, case: str) -> None:
    words = [word for name in CASES[case] for word in ("--values", str(CHART / name))]
    things = rendered(*words)
    assert len({thing["kind"] for thing in things}) >= 6
    assert said(server, things) == []


def test_the_server_takes_each_option(server: ApiServer) -> None:
    default = [json.dumps(thing) for thing in rendered()]
    found, same = {}, []
    for option, value in OPTIONS.items():
        words = ("--set-json", f"{option}={json.dumps(value)}", *NEEDS.get(option, ()))
        things = [thing for thing in rendered(*words) if json.dumps(thing) not in default]
        if not things and value is not False and option != "serviceMonitor.enabled":
            same.append(option)
        if texts := said(server, things):
            found[option] = texts
    assert found == {}
    assert same == [], "these change nothing"


def test_no_option_is_left_out() -> None:
    def leaves(table: dict[str, Any], above: str = "") -> Iterator[str]:
        for key, value in table.items():
            path = f"{above}{key}"
            if isinstance(value, dict) and value and path != "roles":
                yield from leaves(value, f"{path}.")
            elif path != "roles":
                yield path

    tried = tuple(OPTIONS)
    left = [
        leaf
        for leaf in leaves(values())
        if leaf not in ALONE and not any(leaf == option or leaf.startswith(f"{option}.") for option in tried)
    ]
    assert left == []
    of_roles = {key for role in values()["roles"].values() for key in role}
    assert of_roles <= {option.split(".")[2] for option in tried if option.startswith("roles.") and option.count(".") == 2}


def test_it_would_refuse_what_is_wrong(server: ApiServer) -> None:
    [thing] = [each for each in rendered() if each["kind"] == "StatefulSet" and each["metadata"]["name"] == "px-broker-0"]
    misspelt, wrong = copy.deepcopy(thing), copy.deepcopy(thing)
    misspelt["spec"]["replica"] = misspelt["spec"].pop("replicas")
    wrong["spec"]["template"]["metadata"]["labels"] = {"of": "another"}
    assert "unknown field" in server.tried(misspelt, NAMESPACE).refusal
    assert "`selector` does not match template `labels`" in server.tried(wrong, NAMESPACE).refusal

"""The Helm chart: its values are what the roles take, and what helm renders are processes that start as the options say.

Rendering needs helm, and the schemas' check kubeconform; values are checked without both.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema  # type: ignore[import-untyped]
import pytest

from cluster.access.minting import make_demo
from cluster.settings.command import parse
from cluster.settings.options import ClientListenerOptions, ClusterOptions, RoleOptions, load_options
from cluster.trust.key_folder import add_key, use_key
from cluster.trust.pki import issue, make_authority
from pixiu.discovery.paths import DOUBLED_ROLES, GROUPED_ROLES, PARTITIONED_ROLES, ROLES
from pixiu.version import __version__
from registry.layout_change import parse_wanted
from tests.docs.snippets import problems_of_line

yaml = pytest.importorskip("yaml")
CHART = Path(__file__).parents[2] / "deploy/helm/pixiu"
HELM, KUBECONFORM = shutil.which("helm"), shutil.which("kubeconform")
SCHEMAS = os.environ.get("PIXIU_KUBERNETES_SCHEMAS", "")
"""Folder of schemas of Kubernetes, made from its OpenAPI description (docs/deployment.md)."""
CASES = {"default": (), "insecure": ("ci/insecure-values.yaml",), "guarded": ("ci/guarded-values.yaml",)}
KUBERNETES = "1.30.0"
"""The version to render for: a helm that was built from its Go module takes itself for one of 1.20."""
CLIENT_ROLES = {role for role in ROLES if issubclass(importlib.import_module(f"{role}.options").Options, ClientListenerOptions)}
needs_helm = [pytest.mark.process, pytest.mark.skipif(HELM is None, reason="no helm")]


def options_of(role: str) -> type[RoleOptions]:
    found: type[RoleOptions] = importlib.import_module(f"{role}.options").Options
    return found


def values(*files: str) -> dict[str, Any]:
    """The chart's values, with those of the files over them, as helm joins them."""
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    for name in files:
        join(found, yaml.safe_load((CHART / name).read_text()))
    return found


def join(below: dict[str, Any], over: dict[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            join(below[key], value)
        else:
            below[key] = value


@pytest.mark.parametrize("case", CASES)
def test_values_are_of_the_schema(case: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(values(*CASES[case]), schema)


@pytest.mark.parametrize(
    ("path", "wrong"),
    [("roles.broker.partitions", 3), ("roles.brokers", {"replicas": 1}), ("ports.mqtt", 0), ("doubling", "topic"), ("secret", "x")],
)
def test_the_schema_refuses_what_cannot_be(path: str, wrong: object) -> None:
    found = values()
    *folders, key = path.split(".")
    place = found
    for folder in folders:
        place = place[folder]
    place[key] = wrong
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(found, json.loads((CHART / "values.schema.json").read_text()))


def test_the_chart_knows_every_role() -> None:
    found = values()
    assert set(found["roles"]) == set(ROLES)
    assert {role for role, one in found["roles"].items() if "partitions" in one} == set(PARTITIONED_ROLES)
    helpers = (CHART / "templates/_helpers.tpl").read_text()
    defined = re.findall(r'define "pixiu\.(\w+)" -\}\}\n\{\{- list (.*?) \|', helpers)
    lists = {name: set(re.findall(r'"(\w+)"', words)) for name, words in defined}
    assert lists == {"partitioned": set(PARTITIONED_ROLES), "clientRoles": CLIENT_ROLES}
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    assert set(schema["doubling"]["enum"]) == {"", *DOUBLED_ROLES}
    assert set(schema["roles"]["required"]) == set(ROLES)
    assert GROUPED_ROLES == ("topic",), "the Job of a doubling leaves it out by its name"


def test_the_default_survives_the_loss_of_any_one_pod() -> None:
    roles = values()["roles"]
    assert {role for role, one in roles.items() if one["replicas"] < 2} == {"bridge"}
    assert all(roles[role]["replicas"] > roles[role]["options"]["min_in_sync"] >= 2 for role in ("xiu", "pi", "topic"))
    assert all(roles[role]["storage"] for role in ("xiu", "pi", "topic"))


def test_versions_are_one() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
    file = (CHART.parents[1] / "Containerfile").read_text()
    assert f"=={__version__}" in file
    assert f"version={__version__} " in file


class Rendered(NamedTuple):
    """What helm made of the chart."""

    case: str
    values: dict[str, Any]
    documents: list[dict[str, Any]]

    def of(self, kind: str) -> dict[str, dict[str, Any]]:
        """Objects of a kind, by name."""
        return {each["metadata"]["name"]: each for each in self.documents if each["kind"] == kind}

    def processes(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """(role, partition, StatefulSet) of each, -1 for no partition."""
        for each in self.of("StatefulSet").values():
            labels = each["metadata"]["labels"]
            if labels["app.kubernetes.io/name"] == "pixiu" and "pixiu/partition" in labels:
                partition = labels["pixiu/partition"]
                yield labels["app.kubernetes.io/component"], -1 if partition == "none" else int(partition), each


@cache
def text_of(case: str) -> str:
    """What helm renders."""
    words = [word for name in CASES[case] for word in ("--values", str(CHART / name))]
    command = [str(HELM), "template", "px", str(CHART), "--namespace", "test", "--kube-version", KUBERNETES, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(params=[pytest.param(case, marks=needs_helm) for case in CASES])
def rendered(request: pytest.FixtureRequest) -> Rendered:
    documents = [each for each in yaml.safe_load_all(text_of(request.param)) if each]
    return Rendered(request.param, values(*CASES[request.param]), documents)


@pytest.mark.parametrize("case", [pytest.param(case, marks=needs_helm) for case in CASES])
def test_helm_finds_nothing_wrong(case: str) -> None:
    words = [word for name in CASES[case] for word in ("--values", str(CHART / name))]
    done = subprocess.run(
        [str(HELM), "lint", "--strict", str(CHART), *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout


def conforms(text: str) -> subprocess.CompletedProcess[str]:
    """What kubeconform says of rendered objects."""
    place = f"{SCHEMAS}/{{{{ .ResourceKind }}}}{{{{ .KindSuffix }}}}.json"
    command = [str(KUBECONFORM), "-strict", "-summary", "-skip", "ServiceMonitor", "-schema-location", place]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.skipif(KUBECONFORM is None or not SCHEMAS, reason="no kubeconform with PIXIU_KUBERNETES_SCHEMAS")
@pytest.mark.parametrize("case", [pytest.param(case, marks=needs_helm) for case in CASES])
def test_the_api_of_kubernetes_has_all_fields(case: str) -> None:
    done = conforms(text_of(case))
    assert done.returncode == 0, done.stdout
    wrong = conforms(text_of(case).replace("podManagementPolicy:", "podManagmentPolicy:", 1))
    assert (wrong.returncode, "podManagmentPolicy" in wrong.stdout) == (1, True), "it would find a misspelt field"


def test_each_role_and_partition_has_its_pods_and_a_budget(rendered: Rendered) -> None:
    wanted = {}
    for role, one in rendered.values["roles"].items():
        number = one.get("partitions", 1) * (2 if role == rendered.values["doubling"] else 1)
        for partition in range(number) if one["replicas"] else ():
            wanted[role, partition if role in PARTITIONED_ROLES else -1] = one["replicas"]
    found = list(rendered.processes())
    assert {(role, partition): each["spec"]["replicas"] for role, partition, each in found} == wanted
    budgets = rendered.of("PodDisruptionBudget")
    for _, _, each in found:
        labels = each["spec"]["template"]["metadata"]["labels"]
        [budget] = [one for one in budgets.values() if one["spec"]["selector"]["matchLabels"].items() <= labels.items()]
        assert budget["spec"]["maxUnavailable"] == 1
        assert each["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_every_process_takes_its_configuration(rendered: Rendered, tmp_path: Path) -> None:
    """By the loader of the options, with the ports that its pod has."""
    [config] = rendered.of("ConfigMap").values()
    text = config["data"]["pixiu.toml"]
    if not rendered.values["insecure"]:
        add_key(tmp_path / "keys")
        use_key(tmp_path / "keys")
        shutil.copytree(tmp_path / "keys", tmp_path / "tickets")
        make_authority(tmp_path / "ca")
        for role in ROLES:
            issue(tmp_path / "ca", role, tmp_path / "tls")
        (tmp_path / "clients").mkdir()
        for name in ("tls.crt", "tls.key"):
            shutil.copy(tmp_path / "tls/gateway.pem", tmp_path / "clients" / name)
        make_demo(tmp_path / "access", ())
        (tmp_path / "bridges").mkdir()
        (tmp_path / "bridges/bridges.toml").write_text('[b]\nkind = "to-webhook"\ntopic = "t"\nurl = "http://127.0.0.1:1/"\n')
        text = text.replace("/etc/pixiu/", f"{tmp_path}/")
    (tmp_path / "config").mkdir()
    (tmp_path / "config/pixiu.toml").write_text(text)
    for role, partition, each in rendered.processes():
        pod = each["spec"]["template"]["spec"]
        [container] = pod["containers"]
        words = [word.replace("$(POD_IP)", "10.1.2.3").replace("$(POD_NAME)", "px-0") for word in container["args"]]
        assert not [word for word in words if "$(" in word]
        name, *arguments = [word.replace("/etc/pixiu/", f"{tmp_path}/") for word in words]
        wanted = parse(role, options_of(role), arguments)
        _, options = load_options(role, options_of(role), wanted.config, {}, wanted.overrides, names_registry=True)
        assert (name, getattr(options, "partition", -1)) == (role, partition)
        assert options.address_host == getattr(options, "mqtt_host", "10.1.2.3") == "10.1.2.3"
        if isinstance(options, ClientListenerOptions):
            assert options.client_address_host == "px-0.px.test.svc", "of the headless Service, which a certificate can name"
        keys = ("port", "http_port", "stream_port", "client_port", "mqtt_port", "websocket_port", "api_port")
        listening = {getattr(options, key) for key in keys if getattr(options, key, 0)}
        assert listening == {port["containerPort"] for port in container["ports"]}
        names = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert names["http"] == options.http_port
        assert {container[probe]["httpGet"]["port"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")} == {"http"}
        assert container["readinessProbe"]["httpGet"]["path"] == "/health"
        assert pod["terminationGracePeriodSeconds"] > options.drain_timeout_s
        assert pod["enableServiceLinks"] is False, "else PIXIU_BROKER_PORT of a Service would be an option"
        assert (pod["securityContext"]["runAsNonRoot"], container["securityContext"]["readOnlyRootFilesystem"]) == (True, True)
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {str(Path(options.data_dir).parent), "/etc/pixiu/config"} <= mounts
        assert not [mount for mount in container["volumeMounts"] if "subPath" in mount], "it would keep a file that was changed"
        assert ("/dev/shm" in mounts) == (role in ("xiu", "gateway"))
        claims = [claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", ())]
        volumes = [*(volume["name"] for volume in pod["volumes"]), *claims]
        assert len(volumes) == len(set(volumes))
        assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)


def test_a_pod_gets_the_secrets_of_its_role_alone(rendered: Rendered) -> None:
    if rendered.case != "guarded":
        return
    for role, _, each in rendered.processes():
        volumes = {volume["name"]: volume for volume in each["spec"]["template"]["spec"]["volumes"]}
        secrets = {name: volume["secret"] for name, volume in volumes.items() if "secret" in volume}
        assert [item["key"] for item in secrets["tls"]["items"]] == ["ca.pem", f"{role}.pem"]
        assert [item["key"] for item in secrets["registry-secret"]["items"]] == [role]
        assert ("tickets" in secrets) == (role != "gateway")
        assert ("access" in secrets, "clients" in secrets) == (role in CLIENT_ROLES, role in CLIENT_ROLES)
        assert "keys" in secrets
        assert all(int(secret["defaultMode"]) & 0o007 == 0 for secret in secrets.values())
    for job in rendered.of("Job").values():
        secrets = {volume["name"]: volume["secret"] for volume in job["spec"]["template"]["spec"]["volumes"] if "secret" in volume}
        assert {name: [item["key"] for item in secret["items"]] for name, secret in secrets.items()} == {
            "tls": ["ca.pem", "operator.pem"],
            "registry-secret": ["operator"],
        }


def test_jobs_run_commands_that_there_are(rendered: Rendered) -> None:
    commands = [" ".join(job["spec"]["template"]["spec"]["containers"][0]["command"]) for job in rendered.of("Job").values()]
    assert [problem for line in commands for problem in problems_of_line(line)] == []
    layout = next(line for line in commands if "layout set" in line).split()[3:]
    roles = rendered.values["roles"]
    wanted = {
        role: (one.get("partitions", 1), one["replicas"])
        for role, one in roles.items()
        if one["replicas"] and role != rendered.values["doubling"]
    }
    assert {role: (one.n, one.replicas) for role, one in parse_wanted(layout).items()} == wanted
    others = sorted(line for line in commands if "layout set" not in line)
    if rendered.case == "guarded":
        assert others == ["pixiu double broker --to 4 --yes --timeout 600", "pixiu rolling-restart --yes --timeout 600"]
    else:
        assert others == []


def test_services_and_policies_name_ports_and_pods_that_there_are(rendered: Rendered) -> None:
    pods = [each["spec"]["template"] for each in rendered.of("StatefulSet").values()]
    for service in rendered.of("Service").values():
        chosen = [pod for pod in pods if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()]
        assert chosen
        for pod in chosen:
            named = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= named
    names = set(rendered.of("Service"))
    assert all(each["spec"]["serviceName"] in names for each in rendered.of("StatefulSet").values())
    ports = rendered.values["ports"]
    clients = rendered.of("NetworkPolicy")["px-clients"]["spec"]
    wanted = {ports[key] for key in ("clients", "mqtt", "websocket", "api") if ports[key]}
    assert {port["port"] for port in clients["ingress"][0]["ports"]} == wanted
    assert set(clients["podSelector"]["matchExpressions"][0]["values"]) == CLIENT_ROLES
    assert bool(rendered.of("ServiceMonitor")) == rendered.values["serviceMonitor"]["enabled"]
    assert ("px-zookeeper" in names) == (not rendered.values["registry"]["hosts"])


def refusal(*sets: str) -> str:
    """What helm says when it refuses values."""
    words = [word for each in sets for word in ("--set", each)]
    command = [str(HELM), "template", "px", str(CHART), "--kube-version", KUBERNETES, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0, f"it renders {sets}"
    return done.stderr


@pytest.mark.process
@pytest.mark.skipif(HELM is None, reason="no helm")
def test_a_cluster_without_certificates_must_be_asked_for() -> None:
    assert "`insecure: true` goes without" in refusal("secrets.tls=")


REFUSED = [
    ("roles.xiu.replicas=1", "set roles.xiu.options.min_in_sync to 1"),
    ("roles.pi.replicas=1", "set roles.pi.options.min_in_sync to 1"),
    ("roles.topic.options.min_in_sync=4", "raise roles.topic.replicas"),
    ("registry.hosts=zk://a:1", "without zk:// and spaces"),
    ("registry.hosts=bad host", "write HOST:PORT,HOST:PORT"),
    ("registry.hosts=a:2181/pubsub", "registry.root"),
    ("registry.hosts=a:65536", "write HOST:PORT,HOST:PORT"),
    ("roles.pi.options.drain_timeout_s=500", "set drainSeconds"),
    ("roles.gateway.options.drain_timeout_s=45", "45 s after SIGTERM"),
    ("roles.gateway.options.mqtt_port=99999", "leave it out, and set ports.mqtt"),
    ("roles.xiu.options.registry=zk://a:1/x", "leave it out, and set registry.hosts"),
    ("roles.xiu.options.data_dir=/data", "the chart sets data_dir itself"),
    ("roles.proxy.options.advertised_client_host=a", "the chart sets advertised_client_host itself"),
    ("roles.broker.options.partition=1", "the chart sets partition itself"),
    ("roles.broker.options.cluster_insecure=false", "leave it out, and set insecure"),
    ("ports.websocket=1883", "ports.mqtt are both 1883"),
    ("ports.mqtt=7000", "ports.cluster are both 7000"),
    ("roles.gateway.options.mqtt_plain_port=7002", "ports.clients are both 7002"),
    ("doubling=xiu,roles.xiu.replicas=0", "set roles.xiu.replicas, or empty doubling"),
    (r"podLabels.app\.kubernetes\.io/name=x", "take another key"),
    (r"serviceMonitor.labels.helm\.sh/chart=x", "take another key"),
    ("image=null", "schema"),
    ("cluster=null", "schema"),
    ("registry=null", "schema"),
    ("roles=null", "schema"),
    ("roles.xiu.options=null", "schema"),
    ("ports.mqtt=null", "schema"),
]
"""Values that would render a cluster that does not work, and what the refusal says to do."""


@pytest.mark.parametrize(("wrong", "words"), [pytest.param(*each, id=each[0], marks=needs_helm) for each in REFUSED])
def test_a_cluster_that_cannot_work_is_refused(wrong: str, words: str) -> None:
    said = refusal("insecure=true", wrong)
    assert words in said
    assert "nil pointer" not in said
    *_, last = wrong.partition("=")[0].rpartition(".")
    assert last.rpartition("/")[2] in said, "it names the value at fault"


@pytest.mark.process
@pytest.mark.skipif(HELM is None, reason="no helm")
def test_a_key_of_the_cluster_that_the_chart_sets_is_refused() -> None:
    assert "cluster.tls_dir: the chart sets tls_dir itself: leave it out, and set secrets.tls" in refusal("cluster.tls_dir=/x")


TAKEN = [
    r"registry.hosts=a:65535\,[::1]:2181\,c",
    "roles.xiu.replicas=1,roles.xiu.options.min_in_sync=1",
    "roles.pi.options.drain_timeout_s=44.5",
    "roles.pi.options.drain_timeout_s=500,drainSeconds=500",
    "roles.pi.options.log_format=console",
    "roles.gateway.options.mqtt_plain_port=1884",
    "doubling=xiu",
    "podLabels=null",
    "storageClass=null",
]


@pytest.mark.parametrize("right", [pytest.param(each, marks=needs_helm) for each in TAKEN])
def test_what_can_work_is_rendered(right: str) -> None:
    words = ("--kube-version", KUBERNETES, "--set", "insecure=true", "--set", right)
    done = subprocess.run(
        [str(HELM), "template", "px", str(CHART), *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def words_of(text: str, name: str) -> list[str]:
    """The quoted words of a list or a dictionary that a template defines, or of a list that it asks `has`."""
    [found] = re.findall(rf"{re.escape(name)} (?:\((?:list)|:= (?:list|dict)) (.*?)\)? \}}\}}", text)
    return re.findall(r'"([^"]+)"', found)


def test_the_checks_know_what_the_chart_sets() -> None:
    checks = (CHART / "templates/_checks.tpl").read_text()
    pods = (CHART / "templates/statefulset.yaml").read_text()
    assert set(words_of(checks, "$arguments")) == set(re.findall(r"--set=(\w+)=", pods))
    pairs = words_of(checks, "$instead")
    known = {key for role in ROLES for key in options_of(role).__dataclass_fields__} | set(ClusterOptions.__dataclass_fields__)
    assert set(pairs[::2]) <= known
    found = values()
    for path in re.findall(r"[\w.]+\w", " ".join(pairs[1::2]).replace(" and ", " ")):
        folder, _, key = path.rpartition(".")
        assert key in (found[folder] if folder else found)


def test_pods_have_the_labels_that_are_refused_to_others(rendered: Rendered) -> None:
    refused = set(words_of((CHART / "templates/_checks.tpl").read_text(), "has $key"))
    for _, _, each in rendered.processes():
        assert set(each["spec"]["template"]["metadata"]["labels"]) == refused


def test_cluster_options_of_the_chart_are_options() -> None:
    written = re.findall(r'set \$cluster "(\w+)"', (CHART / "templates/configmap.yaml").read_text())
    assert written
    assert set(written) <= set(ClusterOptions.__dataclass_fields__)

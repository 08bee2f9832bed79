"""The table of `pixiu up`: a row for each process and role, and below it what flows, from the metrics of the processes."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

import gateway.core
import gateway.delivery.mail
import proxy.core
import proxy.mail.pipeline
from cluster.core.role import totals
from onebox.commands import tries_of
from onebox.grouping import Grouping
from onebox.screen import FLOWS, Rates, render
from onebox.up import LocalCluster, UpOptions
from tests.support.zookeeper import make_node

PROXY, GATEWAY = 1, 2


def pages(second: int) -> tuple[list[tuple[str, object, float]], list[tuple[str, object, float]]]:
    proxy: list[tuple[str, object, float]] = [
        ("pixiu_proxy_records_in_total", {}, 130.0 * second),
        ("pixiu_proxy_signal_copies_in_total", {}, 30.0 * second),
        ("pixiu_proxy_mail_mails_in_total", {}, 5.0 * second),
        ("pixiu_proxy_links_lost_items", {"peer": "a"}, 1.0),
        ("pixiu_proxy_links_lost_items", {"peer": "b"}, 2.0),
    ]
    gateway: list[tuple[str, object, float]] = [
        ("pixiu_gateway_deliveries_total", {}, 2000.0 * second),
        ("pixiu_gateway_signals_delivered_total", {}, 10.0 * second),
        ("pixiu_gateway_mail_delivered_total", {}, 6.0 * second),
        ("pixiu_gateway_links_records_received_total", {}, 70.0 * second),
    ]
    return proxy, gateway


def test_what_flows_is_the_growth_of_all_processes_a_second() -> None:
    rates = Rates()
    assert rates.flow() == "messages 0/s sent, 0/s delivered · signals 0/s delivered · mail 0/s sent, 0/s delivered"
    for second in (1, 3):
        proxy, gateway = pages(second)
        rates.take("proxy", PROXY, float(second), proxy)
        rates.take("gateway", GATEWAY, float(second), gateway)
    assert rates.flow() == "messages 100/s sent, 2,000/s delivered · signals 10/s delivered · mail 5/s sent, 6/s delivered"
    assert (rates.rates[GATEWAY]["in"], rates.rates[PROXY]["lost"]) == (70.0, 3.0)


def test_the_metrics_of_what_flows_are_those_that_roles_have() -> None:
    served = {f"proxy_{name}" for name in {**totals(proxy.core.Counters()), **totals(proxy.mail.pipeline.Counters(), "mail_")}}
    served |= {
        f"gateway_{name}" for name in {**totals(gateway.core.Counters()), **totals(gateway.delivery.mail.MailCounters(), "mail_")}
    }
    assert set(FLOWS) <= served


def test_a_node_has_a_row_of_its_own_and_one_for_each_role(tmp_path: Path) -> None:
    cluster = LocalCluster(UpOptions.of(Grouping.NODES, {"xius": 1, "xiu_replicas": 1, "pis": 0, "topics": 0}, data=tmp_path))
    gateway_0 = cluster.core.processes["node-0"].spec.entries[-1]
    node = make_node("gateway", host="127.0.0.1", port=7003, mqtt_port=1883)
    cluster.children["node-0"].nodes[gateway_0] = node
    rates = Rates()
    for second in (1, 3):
        rates.take("gateway", node.endpoint, float(second), pages(second)[1])
    console = Console(file=io.StringIO(), width=150)
    console.print(render(cluster, rates, None))
    rows = [line.split() for line in console.file.getvalue().splitlines()[1:]]  # type: ignore[attr-defined]
    assert [row[0] for row in rows[:7]] == ["xiu-0-0", "node-0", "router-0-0", "relay-0-0", "broker-0-0", "proxy-0", "gateway-0"]
    assert rows[1] == ["node-0", "Waiting", "0"]
    assert rows[6] == ["gateway-0", "127.0.0.1:7003,", "MQTT", "1883", "70", "0", "0"]


def test_a_command_of_topics_is_shown_if_there_are_topics(tmp_path: Path) -> None:
    for topics in (0, 1):
        options = UpOptions.of(Grouping.NODES, {"topics": topics}, data=tmp_path)
        assert any("topic create" in line for line in tries_of(options, ())) is bool(topics)

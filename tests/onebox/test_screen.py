"""The line of what flows below `pixiu up`'s table, from the metrics of the processes."""

from __future__ import annotations

import gateway.core
import gateway.delivery.mail
import proxy.core
import proxy.mail.pipeline
from cluster.core.role import totals
from onebox.screen import FLOWS, Rates

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

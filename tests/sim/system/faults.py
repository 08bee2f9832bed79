"""The production cores of a whole system, unless a test says otherwise: a fault is a class that takes the place of one."""

from __future__ import annotations

from dataclasses import dataclass

import cluster.replication.core
import proxy.mail
from relay.delivery.session import Session
from relay.delivery.sessions import Deliveries
from relay.mail_devices import MailDevices
from tests.sim.cluster.faults import Variant


@dataclass(frozen=True)
class SystemVariant(Variant):
    """What is built into a system."""

    replication: type[cluster.replication.core.Core] = cluster.replication.core.Core
    mail: type[proxy.mail.MailCore] = proxy.mail.MailCore
    mail_devices: type[MailDevices] = MailDevices
    deliveries: type[Deliveries] = Deliveries
    session: type[Session] = Session

"""The shell of a relay's mail: Pi, Xiu, gateways and proxies around `relay.mail.core.MailCore`.

    relay data, cluster ┐            ┌ PiLinks: requests to partitions' leaders
    proxies ─▶ Notify ──┼─ MailCore ─┼ Fetcher: messages
    gateways ───────────┘            └ GatewayStreams: deliveries

Source: PiXiu §6.4; docs/delivery.md.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Final

from cluster.core.contract import END_OF_TURN, TICK
from cluster.core.role import RoleShell, totals
from cluster.core.runner import Runner
from cluster.process.context import Context
from cluster.rpc.methods import NOTIFY
from cluster.rpc.pi_links import PiLinks
from cluster.rpc.xiu_fetcher import Fetcher
from cluster.wire.v1 import delivery_pb2
from pixiu.errors import InvalidArgument
from pixiu.rpc.channels import Channels
from pixiu.rpc.duplex import Served, StreamEnded
from pixiu.wire.v1 import pi_pb2
from relay.core import Core
from relay.delivery import events as dv
from relay.delivery.limits import Limits
from relay.delivery.sessions import Deliveries
from relay.mail import events as ev
from relay.mail.answers import FetchItem, acknowledgements_of, fetches_of, notices_of, records_of
from relay.mail.core import MailCore
from relay.mail.devices import MailDevices, Place, TrackedDevices
from relay.mail.gateway_streams import GatewayStreams
from relay.options import Options

FETCH_S: Final = 2.5
"""Shorter than the time limit for a fetch."""
SAVE_S: Final = 3.0
"""Time limit of a stopping relay's wait for Pi to save cursors, seconds."""
SAVE_POLL_S: Final = 0.02
MALFORMED: Final = "a batch of notices has lists of the same length, at most 4096, and records of the sizes that it says"

NoticeHandler = Served[delivery_pb2.NoticesTaken, delivery_pb2.NoticeBatch]


class MailService(RoleShell):
    """Serves proxies' streams of notices, and runs one `relay.mail.core.MailCore`.

    Args:
        context: of the process.
        core: of the relay.
        devices: relay data; must call `changed` when a user who takes mail has changed.
    """

    def __init__(self, context: Context[Options], core: Core, devices: TrackedDevices) -> None:
        super().__init__(context.crash)
        self._context, self._relay = context, core
        options = context.options
        self.devices = MailDevices(devices, core.gateway_at, context.endpoint_id)
        limits = Limits(opening=options.mail_opening, fetching=options.mail_fetching)
        self.core = MailCore(self.devices, Deliveries(self.devices.owns, limits))
        self._channels = Channels(own=context.tls)
        self._pi = PiLinks(lambda: context.view, context.crash, context.framed)
        self._fetcher = Fetcher(lambda: context.view, self._channels)
        max_bytes = options.mail_waiting_mb << 20
        self._gateways = GatewayStreams(
            self, context.endpoint_id, lambda: context.view, max_bytes, context.crash, context.framed
        )  # fmt: skip
        self.runner: Runner[ev.Event, ev.Effect] = self.run(Runner(self.core, context.now, tick=TICK, end_of_turn=END_OF_TURN))
        self._confirmed: list[dv.ConfirmNotices] = []
        """Of the current step."""
        self._enter_effects()
        self._peers = itertools.count(1)
        self._malformed = 0
        context.streams.serve(NOTIFY, delivery_pb2.NoticeBatch.FromString, self.notify)

    def _enter_effects(self) -> None:
        effects = self.runner.effects
        effects.on(ev.ConnectPis, lambda effect: self._pi.set_partitions(effect.partitions))
        effects.on(ev.AskPi, self._ask_pi)
        effects.on(ev.OpenStreams, self._open_streams)
        effects.on(ev.KeepStreams, lambda effect: self._gateways.keep(effect.gateways))
        effects.on(dv.FetchMessages, self._fetch_all)
        effects.on(dv.Deliver, self._deliver)
        effects.on(dv.AskWritten, lambda effect: self._gateways.ask_written(effect.gateway, effect.lanes))
        effects.on(dv.ConfirmNotices, self._confirmed.append)

    # --- what the relay's service calls

    def look_around(self) -> None:
        """Pass on that running processes, or their reachability, may have changed."""
        relay, layout = self._relay, self._context.view.layout
        pis, xius = (layout.partitions(role) if role in layout.roles else 0 for role in ("pi", "xiu"))
        partition, gateways = self._context.options.partition, frozenset(relay.reachable_gateways())
        self.runner.step(ev.ClusterChanged(relay.mail_owners(), partition, relay.partitions, gateways, pis, xius))

    def changed(self) -> None:
        """Relay data has changed: check it at the end of this turn of the loop."""
        self.runner.end_turn_soon()

    async def drain(self) -> None:
        """Stop deliveries, and save acknowledgements of devices."""
        self.runner.step(dv.Stopping())
        loop = asyncio.get_running_loop()
        end = loop.time() + SAVE_S
        while self.core.deliveries.unsaved and loop.time() < end:
            await asyncio.sleep(SAVE_POLL_S)

    async def stop(self) -> None:
        """End all streams and calls."""
        self.stop_runners()
        await self.cancel_tasks()
        await self._gateways.close()
        await self._pi.close()
        await self._channels.close()

    def health(self) -> dict[str, object]:
        """Report sessions and connections."""
        return {
            "sessions": len(self.core.deliveries.sessions),
            "gateways": len(self._gateways),
            "pi_partitions": self._pi.partitions,
            "pi_leaders": self._pi.open,
            "unsaved": self.core.deliveries.unsaved,
        }

    def samples(self) -> dict[str, object]:
        """Samples for metrics."""
        deliveries = self.core.deliveries
        return {
            **totals(deliveries.counters, "mail_"),
            "mail_sessions": len(deliveries.sessions),
            "mail_sessions_busy": deliveries.busy,
            "mail_sessions_waiting": deliveries.waiting,
            "mail_cursors_unsaved": deliveries.unsaved,
            "mail_users": len(self.devices),
            "mail_kept_sessions": len(self.devices.devices.sessions),
            "mail_devices_unnumbered": self.devices.unnumbered,
            "mail_devices_refused_total": self.devices.refused,
            "mail_gateway_streams": len(self._gateways),
            "mail_gateway_streams_broken_total": self._gateways.broken,
            "mail_gateway_waiting_bytes": self._gateways.waiting_bytes,
            "mail_notices_malformed_total": self._malformed,
        }

    # --- proxies

    async def notify(self, handler: NoticeHandler) -> None:
        """Serve one proxy's stream: each batch is answered at once."""
        peer = next(self._peers)
        try:
            while (batch := await handler.read()) is not None:
                for each in self._notified(peer, batch):
                    await handler.write(delivery_pb2.NoticesTaken(number=each.number, elsewhere=each.elsewhere))
        except StreamEnded:
            pass  # the proxy repeats unanswered batches

    def _notified(self, peer: int, batch: delivery_pb2.NoticeBatch) -> list[dv.ConfirmNotices]:
        """Process a batch; return the answers. Raises `InvalidArgument`."""
        notices = notices_of(batch)
        if notices is None:
            self._malformed += 1
            raise InvalidArgument(MALFORMED)
        self.runner.step(dv.Notified(peer, batch.number, notices))
        confirmed = list(self._confirmed)
        self._confirmed.clear()
        return confirmed

    # --- gateways' streams

    def stream_ready(self, gateway: int) -> None:
        """Pass on that a gateway's stream takes deliveries."""
        self.runner.step(dv.StreamReady(gateway))

    def stream_broken(self, gateway: int) -> None:
        """Pass on that deliveries on the way may be lost."""
        self.runner.step(dv.StreamBroken(gateway))

    def acknowledged(self, gateway: int, reply: delivery_pb2.DeliveryReply) -> None:
        """Pass on acknowledgements of a gateway's clients."""
        self.runner.step(dv.Acknowledged(gateway, acknowledgements_of(reply)))

    def place(self, uin: int, number: int) -> Place | None:
        """Return a device's place, by Pi's number."""
        return self.devices.place(uin, number)

    # --- effects

    def _ask_pi(self, effect: ev.AskPi) -> None:
        def answered(reply: pi_pb2.PiReply | None, partitions: int) -> None:
            self.runner.step(ev.PiAnswered(effect.number, None if reply is None or reply.code else reply, partitions))

        self._pi.ask(effect.partition, effect.operations, effect.reads, answered)

    def _open_streams(self, effect: ev.OpenStreams) -> None:
        for gateway in effect.gateways:
            self._gateways.want(gateway)

    def _deliver(self, effect: dv.Deliver) -> None:
        if not self._gateways.deliver(effect.gateway, effect.chunks):
            self.runner.step(dv.StreamBroken(effect.gateway))

    def _fetch_all(self, effect: dv.FetchMessages) -> None:
        for items in fetches_of(effect.items):
            self.spawn(self._fetch(items))

    async def _fetch(self, items: Sequence[FetchItem]) -> None:
        found = await self._fetcher.fetch([msg_ids for _, msg_ids in items], FETCH_S)
        self.runner.step(dv.Fetched(records_of(items, found)))

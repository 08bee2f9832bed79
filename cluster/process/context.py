"""The interface between the runtime and a role's service.

Source: docs/architecture.md; the shape of a daemon follows nsqd's `apps/*`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, runtime_checkable

import grpc.aio
from structlog.typing import FilteringBoundLogger

from cluster.core.turn import Turn
from cluster.links.api import LinkHandler, Links
from cluster.metrics.hot_keys import HotKeys
from cluster.metrics.metrics import Metrics
from cluster.rpc.framed import Framed
from cluster.rpc.framed_listener import FramedListener
from cluster.settings.options import ClusterOptions, RoleOptions
from cluster.trust.audit import Audit
from cluster.trust.listener_tls import ListenerTls
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import View
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.ids import EndpointID
from pixiu.rpc.tls import Tls


class Membership(Protocol):
    """A process's place in the registry: `registry.membership.Membership`."""

    @property
    def node(self) -> Node | None:
        """The node as last registered and set; None while not registered."""

    def before_registering_again(self, renew: Callable[[Node], Awaitable[Node]]) -> None:
        """Set the function that makes the node to register after a lost session from the former node."""

    async def register(self, node: Node) -> Node:
        """Create the node. Returns it with its replica and incarnation. Registers again automatically after a lost session.
        Raises ConfigurationError when processes with other cluster settings are registered."""

    async def set_state(self, state: NodeState) -> bool:
        """Change the state of the node. Returns False when the registry gets it later."""

    async def update(self, node: Node) -> bool:
        """Change the node's data. Returns False when the registry gets it later."""

    async def unregister(self) -> bool:
        """Remove the node. Returns False when it ends with the session instead."""


class MembershipFactory(Protocol):
    """Makes the membership of a process. Passed in by a role's __main__, because this package only reads the registry.

    on_registered: called with the node when it was registered again. conflict_wait_s: time to wait until registered processes with
    other settings are gone. on_drain: called with the name of the requester of a drain; empty: nobody. on_settings: called with
    the data of the registry's node of settings, at the start and after every change.
    """

    def __call__(
        self,
        zookeeper: ZooKeeper,
        root: str,
        *,
        on_registered: Callable[[Node], None],
        conflict_wait_s: float,
        on_drain: Callable[[bytes], None],
        on_settings: Callable[[bytes], None],
    ) -> Membership: ...


OptionsT_co = TypeVar("OptionsT_co", bound=RoleOptions, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Context(Generic[OptionsT_co]):
    """Everything a service is made from. A service adds its servicers to `server` in its constructor."""

    role: str
    options: OptionsT_co
    cluster: ClusterOptions
    endpoint_id: EndpointID
    log: FilteringBoundLogger
    links: Links
    server: grpc.aio.Server
    """The cluster's gRPC server."""
    framed: Framed
    """Opens streams to other processes."""
    membership: Membership
    zookeeper: ZooKeeper
    root: str
    """The cluster's root in ZooKeeper."""
    metrics: Metrics
    current_view: Callable[[], View]
    crash: Callable[[BaseException], None]
    """Ends the process with exit code 1 and logs this error; for the end of a task that the role cannot do without."""

    layout_noticed: Callable[[int], None] = lambda _version: None
    """Reports a layout version that a peer named: if the view's is older, the registry is read again soon."""

    look_again: Callable[[], None] = lambda: None
    """Reports a sender that is not in the view: the registry is read again soon."""

    hot_users: HotKeys = field(default_factory=HotKeys)
    """Users who cause the most work: stores count what they get by streams, `/hot` shows them."""

    pages: dict[str, Callable[[], dict[str, object]]] = field(default_factory=dict)
    """Path of an HTTP page of the role → returns its JSON."""

    queries: dict[str, Callable[[Mapping[str, str]], Awaitable[dict[str, object]]]] = field(default_factory=dict)
    """Path of an HTTP page of the role → makes its JSON from the query of the URL."""

    end_session: Callable[[], None] = lambda: None
    """Ends the session with ZooKeeper, so that others may take this process's place; a new one is opened automatically."""

    audit: Audit = field(default_factory=lambda: Audit(None))
    """The audit log."""

    client_server: grpc.aio.Server | None = None
    """The clients' gRPC server, of a role that has `ClientListenerOptions`."""
    streams: FramedListener = field(default_factory=FramedListener)
    """Listener of the streams that other processes open."""
    tls: Tls | None = None
    """The role's certificates at the cluster's listeners, its own and others'; None: it has none."""
    client_tls: ListenerTls | None = None
    """TLS of the clients' listeners; None: they do not use TLS."""
    client_called: Callable[[str], None] = lambda _peer: None
    """Called with the peer of each call at the clients' server, as gRPC names it."""

    turn: Turn = field(default_factory=lambda: Turn(time.monotonic, asyncio.get_running_loop().call_soon))
    """Time budget of this process's clients, for all protocols."""

    now: Callable[[], float] = time.monotonic
    """Returns the time, monotonic seconds."""

    @property
    def view(self) -> View:
        """The newest view of the cluster."""
        return self.current_view()

    def is_overtaken(self) -> bool:
        """True if records that the links hand over now are late, and others of this role and partition got what was sent later."""
        if not self.links.late:
            return False
        own, running = self.view.by_endpoint(self.endpoint_id), self.view.running(self.role)
        return any(each.endpoint != self.endpoint_id and (own is None or each.partition == own.partition) for each in running)

    @property
    def router_root(self) -> str:
        """Registry root of the routers and gateways: another cluster's, or our own."""
        return self.cluster.router_root or self.root


class Service(LinkHandler, Protocol):
    """The shell of a role. It may also have `async def prepare(self, node: Node) -> Node` (see `Preparing`).

    constructed ─ prepare ─ registered as Init ─ on_view ─ start ─ Running ─ … ─ Draining ─ drain ─ unregistered ─ stop
    """

    def on_view(self, view: View) -> None:
        """Handle a new view. First called before `start`. Must be quick."""

    async def start(self) -> None:
        """Get ready. Returns when the process can serve. Raises a PixiuError when it cannot."""

    async def drain(self) -> None:
        """Hand over; others see Draining already. Cut off after `drain_timeout_s`."""

    async def stop(self) -> None:
        """Release everything. Also called when `start` failed."""

    def health(self) -> dict[str, object]:
        """Return additions for /health: plain values, no payloads. Must be quick."""


@runtime_checkable
class Preparing(Protocol):
    """A service that must act before its node exists: a gateway leases its instance."""

    async def prepare(self, node: Node) -> Node:
        """Prepare the node, after the first view and before the registration. Returns the node to register."""

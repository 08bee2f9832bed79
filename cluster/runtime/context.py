"""What the runtime gives to a role's service, and what it asks of one.

Source: docs/architecture.md; the shape of a daemon follows nsqd's `apps/*`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, runtime_checkable

import grpc.aio
from structlog.typing import FilteringBoundLogger

from cluster.links.api import LinkHandler, Links
from cluster.rpc.framed import Framed
from cluster.rpc.framed_door import FramedDoor
from cluster.runtime.audit import Audit
from cluster.runtime.door_tls import DoorTls
from cluster.runtime.hot_keys import HotKeys
from cluster.runtime.metrics import Metrics
from cluster.runtime.options import ClusterOptions, RoleOptions
from cluster.runtime.turn import Turn
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import View
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.ids import EndpointID


class Membership(Protocol):
    """A process's place in the registry: `registry.membership.Membership`."""

    @property
    def node(self) -> Node | None:
        """The node as it was last registered and set; None while not registered."""

    def before_registering_again(self, renew: Callable[[Node], Awaitable[Node]]) -> None:
        """Have what is registered after a lost session made from the node before."""

    async def register(self, node: Node) -> Node:
        """Create the node; returns it with its replica and incarnation. Registers again by itself after a lost session.
        Raises ConfigurationError when processes with other cluster settings are registered."""

    async def set_state(self, state: NodeState) -> bool:
        """Change the state of the node; False when the registry will be told later."""

    async def update(self, node: Node) -> bool:
        """Change the node's data; False when the registry will be told later."""

    async def unregister(self) -> bool:
        """Remove the node; False when it goes with the session."""


class MembershipFactory(Protocol):
    """Makes the membership of a process. Passed in by a role's __main__, because this package only reads the registry.

    on_registered: called with the node when it was registered anew. conflict_wait_s: how long to wait for registered
    processes with other settings to go. on_drain: called with who asks the process to drain. on_settings: called with the data of
    the registry's node of settings, at the start and after every change.
    """

    def __call__(
        self,
        zookeeper: ZooKeeper,
        root: str,
        *,
        on_registered: Callable[[Node], None],
        conflict_wait_s: float,
        on_drain: Callable[[str], None],
        on_settings: Callable[[bytes], None],
    ) -> Membership: ...


OptionsT_co = TypeVar("OptionsT_co", bound=RoleOptions, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Context(Generic[OptionsT_co]):
    """What a service is made from. Servicers are added to `server` in the service's constructor."""

    role: str
    options: OptionsT_co
    cluster: ClusterOptions
    endpoint_id: EndpointID
    log: FilteringBoundLogger
    links: Links
    server: grpc.aio.Server
    """Of the cluster."""
    membership: Membership
    zookeeper: ZooKeeper
    root: str
    """Of the cluster in ZooKeeper."""
    metrics: Metrics
    current_view: Callable[[], View]
    crash: Callable[[BaseException], None]
    """Ends the process with exit code 1 and this error in its log; for the end of a task that the role cannot live without."""

    layout_noticed: Callable[[int], None] = lambda _version: None
    """Somebody said that the layout has this version: where the view's is older, the registry is read again soon."""

    look_again: Callable[[], None] = lambda: None
    """Somebody speaks whom the view does not have: the registry is read again soon."""

    hot_users: HotKeys = field(default_factory=HotKeys)
    """Which users cause the most work: stores count what comes to them by streams, `/hot` shows it."""

    end_session: Callable[[], None] = lambda: None
    """Ends the session with ZooKeeper, so that others may take this process's place; another one is opened by itself."""

    audit: Audit = field(default_factory=lambda: Audit(None))
    """Who did what."""

    client_server: grpc.aio.Server | None = None
    """Of clients, for a role that has `ClientDoorOptions`."""
    streams: FramedDoor = field(default_factory=FramedDoor)
    """Where this process serves framed streams, besides those of gRPC."""
    framed: Framed | None = None
    """Opens framed streams to processes that offer them; None: gRPC carries all."""
    client_tls: DoorTls | None = None
    """What clients are shown at their doors; None: these do not speak TLS."""
    client_called: Callable[[str], None] = lambda _peer: None
    """Told of the peer of each call at the clients' server, as gRPC names it."""

    turn: Turn = field(default_factory=lambda: Turn(time.monotonic, asyncio.get_running_loop().call_soon))
    """The time of this process's clients, whatever they speak."""

    @property
    def servers_of_clients(self) -> tuple[grpc.aio.Server, ...]:
        """The servers to which what clients call is added: their own, and the cluster's, for gateways and older clients."""
        return (self.server,) if self.client_server is None else (self.client_server, self.server)

    @property
    def view(self) -> View:
        """The newest view of the cluster."""
        return self.current_view()

    @property
    def router_root(self) -> str:
        """Registry root of the routers and gateways: another cluster's, or our own."""
        return self.cluster.router_root or self.root

    def now(self) -> float:
        """The time, monotonic seconds."""
        return time.monotonic()


class Service(LinkHandler, Protocol):
    """A role's shell. It may also have `async def prepare(self, node: Node) -> Node` (see `Preparing`).

    constructed ─ prepare ─ registered as Init ─ on_view ─ start ─ Running ─ … ─ Draining ─ drain ─ unregistered ─ stop
    """

    def on_view(self, view: View) -> None:
        """The view has changed. First called before `start`. Must be quick."""

    async def start(self) -> None:
        """Get ready; returns when the process can serve. Raises a PixiuError when it cannot."""

    async def drain(self) -> None:
        """Hand over; others see Draining already. Cut off after `drain_timeout_s`."""

    async def stop(self) -> None:
        """Release everything. Also called when `start` failed."""

    def health(self) -> dict[str, object]:
        """What /health adds; plain values, no payloads. Must be quick."""


@runtime_checkable
class Preparing(Protocol):
    """A service that must do something before its node exists: a gateway leases its instance."""

    async def prepare(self, node: Node) -> Node:
        """Called with the first view there and the node not yet registered; returns what to register."""


ServiceFactory = Callable[[Context[OptionsT_co]], Service]

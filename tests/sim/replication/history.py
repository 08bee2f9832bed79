"""What happened in a run, and whether it may happen: the invariants of replication.

Source: docs/replication.md, docs/promises.md, "Failure rules".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.replication.core.clock import MAX_STEP_US
from cluster.replication.core.states import State
from cluster.replication.model import START, Entry, EntryKind, MemberID, PartitionState, Position

SLACK_US = 1_000_000
"""What a message may take that tells the time."""

if TYPE_CHECKING:
    from tests.sim.replication.world import Node, World


class History:
    """The truth of one run. `violations` are (what, details) in the order in which they were seen."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.violations: list[tuple[str, str]] = []
        self.log: list[Entry] = []
        """Every entry that any replica called committed, by counter - 1."""
        self.acknowledged: set[Position] = set()
        self.highest: tuple[int, int] | None = None
        """The highest acknowledged position."""
        self.leaders: dict[int, tuple[int, int]] = {}
        """Epoch → (member, start)."""
        self.waits: list[tuple[float, float]] = []
        """Of each acknowledged write: when it was sent, and how long it waited."""
        self.newest = 0
        """The highest epoch in which anything was committed."""

    def violation(self, what: str, details: str) -> None:
        if len(self.violations) < 20:
            self.violations.append((what, f"t={self.world.now:.3f} {details}"))

    def position(self, counter: int) -> Position:
        return self.log[counter - 1].position if counter else START

    def committed(self, node: Node, counter: int, copies: int) -> None:
        """A replica applies up to here, and as a leader answers its clients."""
        log = node.log
        assert log is not None
        for number in range(node.applied + 1, counter + 1):
            index = number - log.first.counter - 1
            entry = log.entries[index] if 0 <= index < len(log.entries) else None
            if entry is None:
                self.violation("committed but absent", f"{number} on {node.member}")
            elif number <= len(self.log):
                if self.log[number - 1] != entry:
                    self.violation("prefixes differ", f"{entry.position} on {node.member}, {self.log[number - 1].position} before")
            elif number == len(self.log) + 1:
                self.log.append(entry)
                if entry.at_us > self.world.true_us + MAX_STEP_US + SLACK_US:
                    self.violation("deleted early", f"{entry.position} is {(entry.at_us - self.world.true_us) / 1e6:.0f} s ahead")
            else:
                self.violation("committed with a gap", f"{number} on {node.member}, {len(self.log)} before")
        node.applied = max(node.applied, counter)
        if copies or (node.core is not None and node.core.leader is not None):
            self._check_members(node, counter)
            self.newest = max(self.newest, log.last.epoch)
        self._answer(node, counter, copies)

    def _check_members(self, leader: Node, counter: int) -> None:
        """An in-sync member has what it confirmed, where a power cut leaves it: checked at each commit, not at the end."""
        assert leader.core is not None
        assert leader.log is not None
        epoch = leader.log.epoch_at(counter)
        state = self.world.zookeeper.state
        members: frozenset[MemberID] = frozenset()
        if leader.core.leader is not None:
            members = leader.core.leader.required()
        elif state is not None and state.epoch == leader.log.last.epoch:  # it has committed and handed over in one step
            members = state.in_sync
        for member in members:
            node = self.world.nodes[member - 1]
            image = node.disk.image
            index = counter - image.first.counter - 1
            if node.disk.rotten or image.unclean or (0 <= index < len(image.entries) and image.entries[index].epoch == epoch):
                continue
            if image.first.counter == counter and image.first.epoch == epoch:
                continue
            self.violation("confirmed but not on the disk", f"{counter} on {member}, in epoch {epoch}")

    def _check_copies(self, counter: int, copies: int) -> None:
        """So many disks hold what is answered, as the answer says; one that has rotted since held it."""
        nodes = self.world.nodes
        held = sum(node.disk.rotten or node.disk.image.unclean or node.disk.image.last.counter >= counter for node in nodes)
        if held < copies or copies < self.world.options.min_in_sync:
            self.violation("answered with fewer copies", f"{counter} is on {held} disks, {copies} are told")

    def _answer(self, node: Node, counter: int, copies: int) -> None:
        while node.writes and node.writes[0][2] <= counter:
            epoch, first, last, before, sent_at = node.writes.popleft()
            if not copies:
                self.world.counts["not confirmed"] += last - first + 1
                continue
            self._check_copies(last, copies)
            self.waits.append((sent_at, self.world.now - sent_at))
            if epoch < self.newest:
                self.violation("acknowledged late", f"{last} of epoch {epoch}, {self.newest} has committed")
            for number in range(first, last + 1):
                position = Position(epoch, number)
                if position in self.acknowledged:
                    self.violation("position twice", f"{position}")
                if before is not None and position <= before:
                    self.violation("IDs do not increase", f"{position} after {before}")
                self.acknowledged.add(position)
                self.highest = max(self.highest or (0, 0), position)
            self.world.counts["acknowledged"] += last - first + 1

    def leading(self, node: Node, epoch: int) -> None:
        """A replica took office: nobody else in this epoch, and with every entry that was acknowledged in lower ones."""
        holder = (int(node.member), node.start)
        if self.leaders.setdefault(epoch, holder) != holder:
            self.violation("two leaders in one epoch", f"{epoch}: {self.leaders[epoch]} and {holder}")
        self.world.counts["promotions"] += 1
        log = node.log
        assert log is not None
        if node.disk.rotten:
            self.violation("unclean promoted", f"{node.member} in epoch {epoch}")
        for position in sorted(self.acknowledged):
            if position.epoch < epoch and position.counter > log.first.counter and log.epoch_at(position.counter) != position.epoch:
                self.violation("acknowledged entry lost", f"{position}, {node.member} leads epoch {epoch} without it")
                return

    def check_repaired(self, node: Node) -> None:
        """A rotten disk is good again when it holds everything that was committed."""
        image = node.disk.image
        if node.disk.rotten and not image.unclean and image.last.counter >= len(self.log) and not self.world.trust_damage:
            held = image.entries[: len(self.log) - image.first.counter]
            if not held or held == self.log[image.first.counter :]:
                node.disk.rotten = False

    def given_up(self, after: int) -> None:
        """An operator promoted a replica whose log ends here: what is beyond it is lost, and he knows."""
        del self.log[after:]
        self.acknowledged = {position for position in self.acknowledged if position.counter <= after}
        self.highest = None

    def read_served(self, epoch: int) -> None:
        if epoch < self.newest:
            self.violation("stale read", f"epoch {epoch}, {self.newest} has committed")

    def state_changed(self, node: Node, before: State, after: State) -> None:
        self.world.counts[f"→ {after.value}"] += 1

    def state_written(self, node: Node, before: PartitionState | None, after: PartitionState) -> None:
        if before is not None and before.epoch == after.epoch:
            self.world.counts["shrinks"] += len(before.in_sync - after.in_sync)
            self.world.counts["grows"] += len(after.in_sync - before.in_sync)

    # --- the end

    def well(self) -> bool:
        """One leader, every replica in sync, equal logs, everything committed."""
        world = self.world
        cores = [node.core for node in world.nodes if node.core is not None]
        leaders = [core for core in cores if core.state is State.LEADING]
        if len(cores) < len(world.nodes) or len(leaders) != 1 or world.zookeeper.state is None:
            return False
        if world.zookeeper.state.in_sync != {node.member for node in world.nodes}:
            return False
        leader = leaders[0]
        ends = {core.context.log.last for core in cores}
        return len(ends) == 1 and all(core.context.committed == leader.context.log.last.counter for core in cores)

    def check_end(self) -> None:
        """The logs are equal byte for byte, and whole."""
        world = self.world
        for node in world.nodes:
            assert node.log is not None
            first = node.log.first.counter
            if node.log.entries != self.log[first:]:
                self.violation("replicas diverge", f"{node.member} has {node.log.last}, committed {len(self.log)}")
        for position in sorted(self.acknowledged):
            if position.counter > len(self.log) or self.log[position.counter - 1].position != position:
                self.violation("acknowledged entry lost", f"{position} at the end")
                break
        payloads = [entry.payload for entry in self.log if entry.kind == EntryKind.DATA]
        if len(set(payloads)) != len(payloads):
            self.violation("entry twice", "a payload is committed at two positions")

"""Client of a Xiu partition's leader for operators' requests: restoring from an archive, trimming archived messages. Blocking.

Source: docs/pipeline.md.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import grpc

from pipeline.spark.replicas import AGAIN, ASK_S, FIRST_PAUSE_S, MAX_PAUSE_S, Replicas, error_of
from pixiu.errors import NotLeader, OutcomeUnknown, PixiuError, Unavailable
from pixiu.rpc.backoff import Backoff
from pixiu.rpc.tls import blocking_peer_channel, own
from pixiu.wire.v1 import xiu_pb2, xiu_pb2_grpc

CALL_S: Final = 60.0
_AGAIN: Final = AGAIN | {NotLeader.code, OutcomeUnknown.code}
Reply = TypeVar("Reply")


class Leader:
    """The current leader of a partition: `with Leader(target, 0, "ann", "why") as leader`.

    Args:
        target: of the cluster.
        partition: of Xiu.
        operator, reason: of the request; both go into the leader's audit log.
        retry_s: time limit for finding a leader.
    """

    def __init__(self, target: str, partition: int, operator: str, reason: str, retry_s: float = 60.0) -> None:
        self._partition, self._operator, self._reason, self._retry_s = partition, operator, reason, retry_s
        self._replicas = Replicas(target, "xiu", retry_s=retry_s)
        self._channel: grpc.Channel | None = None
        self._address, self._member = "", 0

    def __enter__(self) -> Leader:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._leave()
        self._replicas.close()

    def trim(self, position: int) -> int:
        """Trim messages before a position that no reader needs; return the lowest position left. Raises PixiuError."""

        def trim() -> xiu_pb2.TrimReply:
            stub = self._stub()
            request = xiu_pb2.TrimRequest(operator=self._operator, reason=self._reason, member=self._member, position=position)
            try:
                reply: xiu_pb2.TrimReply = stub.Trim(request, timeout=CALL_S)
            except grpc.RpcError as error:
                raise error_of(error, self._address) from None
            return reply

        return self._patiently(trim).floor

    def begin(self) -> xiu_pb2.RestoreReply:
        """Begin or continue a restore; the reply has the restored position, and the end. Raises PixiuError."""
        return self._patiently(lambda: self._call(xiu_pb2.RESTORE_BEGIN))

    def end(self) -> xiu_pb2.RestoreReply:
        """Finish the restore; positions not restored are reported as GONE from now on. Raises PixiuError."""
        return self._patiently(lambda: self._call(xiu_pb2.RESTORE_END))

    def store(self, blocks: list[xiu_pb2.RestoredBlock]) -> xiu_pb2.RestoreReply:
        """Store the blocks after those restored so far; each once, even after failures. Raises PixiuError."""
        asked = False

        def store() -> xiu_pb2.RestoreReply:
            nonlocal asked
            left = blocks
            if asked:
                there = self._call(xiu_pb2.RESTORE_BEGIN)
                left = [block for block in blocks if block.sequence > there.restored]
                if not left:
                    return there
            asked = True
            return self._call(xiu_pb2.RESTORE_BLOCKS, left)

        return self._patiently(store)

    def _patiently(self, call: Callable[[], Reply]) -> Reply:
        until, backoff = time.monotonic() + self._retry_s, Backoff(FIRST_PAUSE_S, MAX_PAUSE_S, random.random)
        while True:
            try:
                return call()
            except PixiuError as problem:
                self._leave()
                pause = backoff.next_s()
                if problem.code not in _AGAIN or time.monotonic() + pause > until:
                    raise
            time.sleep(pause)

    def _call(self, step: xiu_pb2.RestoreStep.ValueType, blocks: Iterable[xiu_pb2.RestoredBlock] = ()) -> xiu_pb2.RestoreReply:
        stub = self._stub()
        request = xiu_pb2.RestoreRequest(
            operator=self._operator, reason=self._reason, member=self._member, step=step, blocks=blocks
        )
        try:
            reply: xiu_pb2.RestoreReply = stub.Restore(request, timeout=CALL_S)
        except grpc.RpcError as error:
            raise error_of(error, self._address) from None
        return reply

    def _stub(self) -> Any:
        return xiu_pb2_grpc.XiuStub(self._channel or self._find())  # type: ignore[no-untyped-call, unused-ignore]

    def _find(self) -> grpc.Channel:
        """Connect to the leader. Raises Unavailable if there is none."""
        self._replicas.find()
        for address in self._replicas.addresses.get(self._partition, ()):
            channel = blocking_peer_channel(address, "xiu", own(), [("grpc.enable_http_proxy", 0)])
            stub: Any = xiu_pb2_grpc.XiuStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
            try:
                found = stub.Position(xiu_pb2.PositionRequest(), timeout=ASK_S)
            except grpc.RpcError:
                channel.close()
                continue
            if found.epoch and found.partition == self._partition:
                self._channel, self._address, self._member = channel, address, found.member
                return channel
            channel.close()
        raise Unavailable(f"nobody leads xiu partition {self._partition}; `pixiu status` says why")

    def _leave(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

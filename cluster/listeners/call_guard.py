"""Permissions for calls at the cluster's ports: one table, enforced where certificates are used.

A caller's role is named by its certificate (`pixiu://role/ROLE`). A method that is not in the table is refused to everybody.

Source: docs/security.md, "gRPC at the cluster's port".
"""

from __future__ import annotations

import inspect
import os
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NamedTuple

import grpc
import grpc.aio
from cryptography import x509

from cluster.trust.audit import Audit
from pixiu.discovery.paths import ROLES
from pixiu.errors import NotAllowed
from pixiu.rpc.tls import OPERATOR, ROLE_URI, Tls, stands_still

SAME: Final = "same"
"""The role of the called process itself: replicas of a Xiu are not replicas of a Pi."""
PIPELINE: Final = "pipeline"
CLIENT: Final = "client"
NOBODY: Final = "nobody"
PROCESSES: Final = tuple(sorted(ROLES))
EVERYBODY: Final = (*PROCESSES, OPERATOR, PIPELINE, CLIENT)
METHODS: Final[dict[str, tuple[str, ...]]] = {
    "/pixiu.v1.Link/Exchange": PROCESSES,
    "/pixiu.v1.Membership/Snapshot": ("broker", "relay", "router"),
    "/pixiu.v1.Retained/Put": ("gateway", "router"),
    "/pixiu.v1.Retained/List": ("gateway", OPERATOR),
    "/pixiu.v1.Retained/Sync": ("router",),
    "/pixiu.v1.Kept/Put": ("gateway", "router"),
    "/pixiu.v1.Kept/Match": ("proxy",),
    "/pixiu.v1.Kept/List": ("gateway", OPERATOR),
    "/pixiu.v1.Kept/Count": ("gateway",),
    "/pixiu.v1.Kept/Sync": ("router",),
    "/pixiu.v1.MailDelivery/Deliver": ("relay",),
    "/pixiu.v1.MailNotices/Notify": ("proxy",),
    "/pixiu.v1.Tickets/Exchange": ("gateway",),
    "/pixiu.v1.Presence/Query": ("proxy",),
    "/pixiu.v1.Pi/Exchange": ("gateway", "proxy", "relay", OPERATOR),
    "/pixiu.v1.Copying/Learn": ("pi",),
    "/pixiu.v1.Xiu/Store": ("proxy",),
    "/pixiu.v1.Xiu/Fetch": ("relay", "xiu", OPERATOR),
    "/pixiu.v1.Xiu/Scan": ("xiu",),
    "/pixiu.v1.Xiu/Position": ("relay", "xiu", OPERATOR, PIPELINE),
    "/pixiu.v1.Xiu/Rows": ("xiu",),
    "/pixiu.v1.Xiu/Restore": (OPERATOR, PIPELINE),
    "/pixiu.v1.Xiu/Trim": (OPERATOR, PIPELINE),
    "/pixiu.v1.XiuPartitions/Ask": ("xiu",),
    "/pixiu.v1.Export/Bounds": (OPERATOR, PIPELINE),
    "/pixiu.v1.Export/Rows": (OPERATOR, PIPELINE),
    "/pixiu.v1.Export/Hold": (OPERATOR, PIPELINE),
    "/pixiu.v1.Doubling/Status": (OPERATOR,),
    "/pixiu.v1.Doubling/Advance": (OPERATOR,),
    "/pixiu.v1.Doubling/TakeBack": (OPERATOR,),
    "/pixiu.v1.Replication/Exchange": (SAME,),
    "/pixiu.v1.Replication/Snapshot": (SAME,),
    "/pixiu.v1.Replication/ResumeSnapshot": (SAME,),
    "/pixiu.v1.Replication/Promote": (OPERATOR,),
    "/pixiu.v1.Replication/SetClock": (OPERATOR,),
    "/pixiu.v1.Repair/Verify": (SAME, OPERATOR),
    "/pixiu.v1.Repair/Digest": (SAME,),
    "/pixiu.v1.Repair/Compare": (OPERATOR,),
    "/pixiu.v1.Repair/GiveUp": (OPERATOR,),
    "/pixiu.v1.TopicGroups/Append": ("admin", OPERATOR),
    "/pixiu.v1.TopicGroups/Finished": (SAME, OPERATOR),
    "/pixiu.v1.TopicGroups/Load": ("admin", OPERATOR),
    "/pixiu.v1.TopicGroups/Blocks": (SAME,),
    "/pixiu.v1.Admin/Change": ("proxy", OPERATOR),
    "/pixiu.v1.Admin/Plan": ("proxy", OPERATOR),
    "/pixiu.v1.Admin/Status": ("proxy", OPERATOR),
    "/grpc.health.v1.Health/Check": EVERYBODY,
    "/grpc.health.v1.Health/Watch": EVERYBODY,
    "/grpc.health.v1.Health/List": EVERYBODY,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": (OPERATOR,),
}
"""Method → roles that may call it at the cluster's port."""
MAX_CALLERS: Final = 1024
"""Certificates that are cached after parsing."""
REVOKED_S: Final = 1.0
"""Interval of checking the file of revoked certificates."""
NO_FILE: Final = (0, 0)
"""Stamp of a file that was not read yet."""


def may_call(method: str, caller: str, own: str) -> bool:
    """Return True if a caller of this role may call the method of a process of the role `own`."""
    allowed = METHODS.get(method, ())
    return caller in allowed or (caller == own and SAME in allowed)


class Caller(NamedTuple):
    """Identity of a caller, from a certificate."""

    role: str
    name: str
    serial: int = 0


STRANGER: Final = Caller(NOBODY, "")


def read_certificate(pem: bytes) -> Caller:
    """Return the role, name and serial number in a certificate that TLS has verified; `nobody` if it names no role, or several."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = [uri for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if uri.startswith(ROLE_URI)]
        common = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension):
        return STRANGER
    role = uris[0].removeprefix(ROLE_URI) if len(uris) == 1 else NOBODY
    if role not in EVERYBODY:
        role = NOBODY
    return Caller(role, str(common[0].value) if common else "", certificate.serial_number)


def caller_of(context: Any) -> Caller:
    """Return the caller by its certificate, revoked or not; `nobody` where callers show none."""
    pems = context.auth_context().get("x509_pem_cert")
    return read_certificate(pems[0]) if pems else STRANGER


def _serial(word: str) -> int | None:
    try:
        return int(word, 16)
    except ValueError:
        return None


class CallGuard(grpc.aio.ServerInterceptor):
    """Refuses calls that the table does not allow, with PERMISSION_DENIED; counts and audits them.

    Args:
        role: this process's role.
        tls: the certificates, whose folder has the file of revoked ones.
        called: called with each call's peer, as gRPC names it.
    """

    def __init__(self, role: str, tls: Tls, audit: Audit, called: Callable[[str], None] = lambda _peer: None) -> None:
        self._role, self._audit, self._called = role, audit, called
        self._revoked_file = tls.folder / "revoked"
        self._revoked: frozenset[int] = frozenset()
        self._revoked_stamp = NO_FILE
        self._revoked_at = 0.0
        self._problem = ""
        self._callers: dict[bytes, Caller] = {}
        self._guarded: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self.refused = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the method, with the check of its caller before it."""
        method = str(handler_call_details.method)
        found = self._guarded.get(method)
        if found is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            found = self._guarded[method] = self._guard(method, handler)
        return found

    def caller_of(self, context: Any) -> Caller:
        """Return the caller. Source: docs/security.md."""
        pems = context.auth_context().get("x509_pem_cert")
        return self._caller(pems[0]) if pems else STRANGER

    def _caller(self, pem: bytes) -> Caller:
        caller = self._callers.get(pem)
        if caller is None:
            while len(self._callers) >= MAX_CALLERS:
                del self._callers[next(iter(self._callers))]
            caller = self._callers[pem] = read_certificate(pem)
        return STRANGER._replace(name=caller.name) if caller.serial in self._read_revoked() else caller

    def _read_revoked(self) -> frozenset[int]:
        now = time.monotonic()
        if now < self._revoked_at + REVOKED_S and self._revoked_at:
            return self._revoked
        self._revoked_at = now
        try:
            stamp = self._stamp()
            if stamp != self._revoked_stamp and (self._revoked_stamp == NO_FILE or stands_still(stamp[0])):
                words = self._revoked_file.read_bytes().decode(errors="replace").split()
                if self._stamp() != stamp:
                    return self._revoked  # it is being written
                numbers = {word: _serial(word) for word in words}
                wrong = [word for word, number in numbers.items() if number is None]
                # While the file has errors, former revocations stay in force, too.
                self._revoked = frozenset(number for number in numbers.values() if number is not None) | (
                    self._revoked if wrong else frozenset()
                )
                self._revoked_stamp = stamp
                self._say(f"{len(wrong)} words are no hexadecimal serial numbers, such as {wrong[0][:40]!r}" if wrong else "")
        except FileNotFoundError:  # between `rm` and the new file nobody is admitted again
            self._say("is gone: what was revoked stays revoked; write an empty file if nothing is" if self._revoked else "")
        except OSError as error:  # former revocations stay in force
            self._say(f"cannot be read: {error.strerror}")
        return self._revoked

    def _stamp(self) -> tuple[int, int]:
        stat = os.stat(self._revoked_file)
        return stat.st_mtime_ns, stat.st_size

    @property
    def problem(self) -> str:
        """Error in the file of revoked certificates; empty if there is none."""
        self._read_revoked()
        return self._problem

    def _say(self, wrong: str) -> None:
        self._problem = f"{self._revoked_file}: {wrong}" if wrong else ""
        if wrong:
            self._audit.write_limited("revoked_unreadable", "", error=wrong)

    async def _check(self, method: str, context: Any) -> None:
        peer = str(context.peer())
        self._called(peer)
        if refusal := self._refusal(method, self.caller_of(context), peer):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, refusal)

    def admit(self, method: str, certificate: bytes, peer: str) -> Caller:
        """Return the caller who opens a framed stream, by a certificate (DER) that TLS has verified. Raises `NotAllowed`."""
        caller = self._caller(ssl.DER_cert_to_PEM_cert(certificate).encode()) if certificate else STRANGER
        if refusal := self._refusal(method, caller, peer):
            raise NotAllowed(refusal)
        return caller

    def _refusal(self, method: str, caller: Caller, peer: str) -> str:
        """Return why the table refuses a call, after counting and auditing the refusal; empty if it is allowed."""
        if may_call(method, caller.role, self._role):
            return ""
        self.refused += 1
        self._audit.write_limited(
            "call_refused", f"{method} {caller.role} {caller.name}",
            method=method, caller=caller.role, name=caller.name, peer=peer,
        )  # fmt: skip
        return f"{caller.role} may not call {method} of {self._role}"

    def _guard(self, method: str, handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
        made: Any
        if handler.request_streaming:
            inner = handler.stream_stream if handler.response_streaming else handler.stream_unary
            made = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
        else:
            inner = handler.unary_stream if handler.response_streaming else handler.unary_unary
            made = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler

        async def answers(request: Any, context: Any) -> AsyncIterator[Any]:
            await self._check(method, context)
            async for reply in inner(request, context):
                yield reply

        async def answer(request: Any, context: Any) -> Any:
            await self._check(method, context)
            return await inner(request, context)

        wrapped = answers if inspect.isasyncgenfunction(inner) else answer
        guarded: grpc.RpcMethodHandler[Any, Any] = made(wrapped, handler.request_deserializer, handler.response_serializer)
        return guarded

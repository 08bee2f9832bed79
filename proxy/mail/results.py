"""Refusals of Xiu and Pi, permanent or temporary, and the results that a sender gets for its mail. Pure.

Source: docs/architecture.md, "A mail is sent".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pixiu import errors
from pixiu.errors import Refusal
from pixiu.wire.inbox_operations import Code
from proxy import mail_events as ev
from proxy.mail.batches import Part

PERMANENT: Final = frozenset({
    errors.IdReused.code, errors.IdTooOld.code, errors.IdAhead.code, errors.RecordTooLarge.code, errors.InvalidArgument.code,
    errors.ChecksumWrong.code, errors.DiskFull.code, errors.TooManyReceivers.code,
})  # fmt: skip
"""Errors reported to the sender at once; everything else is tried again."""
NEXT_LEADER: Final = frozenset({
    errors.NotLeader.code, errors.StaleStream.code, errors.Draining.code, errors.OutcomeUnknown.code, errors.WrongPartition.code,
})  # fmt: skip
"""Errors after which another leader may take it."""
STALE_WRITER: Final = -Code.STALE_WRITER
INBOX_FULL: Final = -Code.INBOX_FULL
DISK_FULL: Final = -Code.DISK_FULL
"""Results of Pi."""
_FULL_TEXT: Final = "the inbox is at its limit and refuses more (pi.inbox_full); the user must acknowledge some first"


def why_not(result: int) -> Refusal:
    """Error code and text for an append that Pi refused."""
    if result == INBOX_FULL:
        return Refusal(errors.InboxFull.code, _FULL_TEXT)
    if result == DISK_FULL:
        return Refusal(errors.DiskFull.code, "Pi has no space; free some, writes then continue without a restart")
    return Refusal(errors.InvalidArgument.code, f"Pi refused it ({result})")


def results_of_each(part: Part, results: Sequence[int], copies: int) -> list[ev.Result]:
    """Results of mails with one receiver each; adjacent appended ones are one result."""
    batch, found = part.batch, list[ev.Result]()
    positions = [batch.positions[index] for index in part.indexes]
    msg_ids = [batch.msg_ids[index] for index in part.indexes]
    good = not results or min(results) > 0
    begin = 0
    for at in range(1, len(positions) + 1):
        if (
            at < len(positions)
            and positions[at] == positions[at - 1] + 1
            and (good or (results[at] > 0) == (results[begin] > 0))
        ):  # fmt: skip
            continue
        if good or results[begin] > 0:
            found.append(ev.Result(positions[begin], at - begin, copies, msg_ids[begin:at]))
        else:
            refused = zip(positions[begin:at], msg_ids[begin:at], results[begin:at], strict=True)
            found += [ev.refused(position, why_not(result), (msg_id,)) for position, msg_id, result in refused]
        begin = at
    return found


def inboxes_grew(part: Part, results: Sequence[int]) -> ev.InboxesGrew:
    """Inboxes that took their mail."""
    batch, indexes, uins = part.batch, part.indexes, part.uins
    if results and min(results) <= 0:
        good = [at for at, result in enumerate(results) if result > 0]
        indexes, uins, results = [indexes[at] for at in good], [uins[at] for at in good], [results[at] for at in good]
    return ev.InboxesGrew(uins, results, [batch.msg_ids[index] for index in indexes], batch.data, batch.ends, indexes)

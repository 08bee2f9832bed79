"""Remembered answers of a slow authenticator, and a breaker that stops questions to it. Pure.

A breaker opens when too many of the latest questions failed, from several addresses: one client with questions that make a service
fail cannot close it to others. Then nothing is asked for a while; after that one question is asked, and an answer closes the
breaker. Clients whose last answer was a yes have the first try: strangers cannot take it away from them.

    CLOSED ──(failures of the last 20, of 3 addresses)──▶ OPEN ──(open_s)──▶ one is asked ──(answer)──▶ CLOSED
                                                            ▲───────────────────(failure)──────┘

Source: docs/security.md, "A callback".
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from typing import Final, Generic, TypeVar

Answer = TypeVar("Answer")
DIGEST_BYTES: Final = 16
WINDOW: Final = 20
"""Number of latest questions that a breaker considers."""
MIN_ADDRESSES: Final = 3
"""Addresses whose questions must have failed before it opens."""


class Remembered(Generic[Answer]):
    """Answers by question, each valid for a time; at most `limit`, of which the oldest are dropped first. Of a question only a
    keyed digest is kept.

    Args:
        key: secret of this process.
        limit: number of answers.
    """

    def __init__(self, key: bytes, limit: int) -> None:
        self._key, self._limit = key, limit
        self._answers: OrderedDict[bytes, tuple[float, Answer]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def put(self, asked: tuple[str, ...], answer: Answer, until: float) -> None:
        """Keep an answer until this time."""
        digest = self._digest(asked)
        self._answers.pop(digest, None)
        self._answers[digest] = (until, answer)
        while len(self._answers) > self._limit:
            self._answers.popitem(last=False)

    def get(self, asked: tuple[str, ...], now: float) -> Answer | None:
        """The answer, if there is one that is still valid."""
        found = self._answers.get(self._digest(asked))
        return None if found is None or now >= found[0] else found[1]

    def last(self, asked: tuple[str, ...]) -> Answer | None:
        """The previous answer, even if no longer valid, while there is space for it."""
        found = self._answers.get(self._digest(asked))
        return None if found is None else found[1]

    def forget(self, asked: tuple[str, ...]) -> None:
        """Forget an answer."""
        self._answers.pop(self._digest(asked), None)

    def clear(self) -> None:
        """Forget all answers."""
        self._answers.clear()

    def _digest(self, asked: tuple[str, ...]) -> bytes:
        digest = hashlib.blake2b(key=self._key, digest_size=DIGEST_BYTES)
        for text in asked:
            data = text.encode(errors="surrogatepass")
            digest.update(len(data).to_bytes(8, "big") + data)
        return digest.digest()


class Breaker:
    """Args: failures: number of the last `WINDOW` questions that must fail to open it. open_s: seconds until a question is asked
    again."""

    def __init__(self, failures: int, open_s: float) -> None:
        self._limit, self._open_s = failures, open_s
        self._last: deque[str] = deque(maxlen=WINDOW)
        """Address of each failed question; empty for an answered one."""
        self._again_at = 0.0
        self.is_open = False
        """True if failures have opened it and no answer has closed it since."""
        self.opened = 0

    def may_ask(self, now: float, known: bool = False) -> bool:
        """True if a question may be asked now. While the breaker is open these are single ones: by clients with an earlier yes
        (`known`) after `open_s`, by others after twice that time."""
        if not self.is_open:
            return True
        if now < self._again_at + (0.0 if known else self._open_s):
            return False
        self._again_at = now + self._open_s
        return True

    def answered(self) -> None:
        """Note that an answer came, of whatever content."""
        if self.is_open:
            self.is_open = False
            self._last.clear()
        self._last.append("")

    def failed(self, address: str, now: float) -> None:
        """Note that a question from this address got no answer."""
        self._last.append(address)
        failed = [each for each in self._last if each]
        if not self.is_open and len(failed) >= self._limit and len(set(failed)) >= MIN_ADDRESSES:
            self.is_open = True
            self.opened += 1
        if self.is_open:
            self._again_at = now + self._open_s

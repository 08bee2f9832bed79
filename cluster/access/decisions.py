"""What is remembered of a slow authenticator's answers, and when it is asked no more. Pure.

A breaker opens when too many of the last questions failed, of several addresses: one client that asks what a service fails at
closes it to nobody else. Nobody is asked then until a while is over; one is asked after it, and an answer closes the breaker. Whose
question was answered with yes before has the first try: strangers cannot take it away from them.

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
"""Questions by which a breaker judges."""
MIN_ADDRESSES: Final = 3
"""Of which failures come before it opens."""


class Remembered(Generic[Answer]):
    """Answers by what was asked, each for a time, at most so many: the oldest go first. What was asked is kept as a keyed
    digest only.

    Args:
        key: secret of this process.
        limit: answers.
    """

    def __init__(self, key: bytes, limit: int) -> None:
        self._key, self._limit = key, limit
        self._answers: OrderedDict[bytes, tuple[float, Answer]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def put(self, asked: tuple[str, ...], answer: Answer, until: float) -> None:
        """Keep an answer until then."""
        digest = self._digest(asked)
        self._answers.pop(digest, None)
        self._answers[digest] = (until, answer)
        while len(self._answers) > self._limit:
            self._answers.popitem(last=False)

    def get(self, asked: tuple[str, ...], now: float) -> Answer | None:
        """The answer, if there is one and its time is not over."""
        found = self._answers.get(self._digest(asked))
        return None if found is None or now >= found[0] else found[1]

    def last(self, asked: tuple[str, ...]) -> Answer | None:
        """The answer of before, even if its time is over, as long as there is room for it."""
        found = self._answers.get(self._digest(asked))
        return None if found is None else found[1]

    def clear(self) -> None:
        """Forget all."""
        self._answers.clear()

    def _digest(self, asked: tuple[str, ...]) -> bytes:
        digest = hashlib.blake2b(key=self._key, digest_size=DIGEST_BYTES)
        for text in asked:
            data = text.encode(errors="surrogatepass")
            digest.update(len(data).to_bytes(8, "big") + data)
        return digest.digest()


class Breaker:
    """Args: failures: of the last `WINDOW` questions, that open it. open_s: seconds until one is asked again."""

    def __init__(self, failures: int, open_s: float) -> None:
        self._limit, self._open_s = failures, open_s
        self._last: deque[str] = deque(maxlen=WINDOW)
        """Of each question whose failed; empty: it was answered."""
        self._again_at = 0.0
        self.is_open = False
        """Whether failures have opened it, and no answer has closed it."""
        self.opened = 0

    def may_ask(self, now: float, known: bool = False) -> bool:
        """Whether to ask now. While it is open one may at a time: who had a yes before (`known`), after twice the time others."""
        if not self.is_open:
            return True
        if now < self._again_at + (0.0 if known else self._open_s):
            return False
        self._again_at = now + self._open_s
        return True

    def answered(self) -> None:
        """An answer came, whatever it says."""
        if self.is_open:
            self.is_open = False
            self._last.clear()
        self._last.append("")

    def failed(self, address: str, now: float) -> None:
        """None came to a question of this address."""
        self._last.append(address)
        failed = [each for each in self._last if each]
        if not self.is_open and len(failed) >= self._limit and len(set(failed)) >= MIN_ADDRESSES:
            self.is_open = True
            self.opened += 1
        if self.is_open:
            self._again_at = now + self._open_s

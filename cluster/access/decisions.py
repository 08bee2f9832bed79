"""What is remembered of a slow authenticator's answers, and when it is asked no more. Pure.

A breaker opens after some failures in a row: nobody is asked until a while is over, then one is asked; his answer closes it.

    CLOSED ──(failures)──▶ OPEN ──(open_s)──▶ one is asked ──(answer)──▶ CLOSED
                             ▲────────────────(failure)──────┘

Source: docs/security.md, "A callback".
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Final, Generic, TypeVar

Answer = TypeVar("Answer")
DIGEST_BYTES: Final = 16


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
        digest = self._digest(asked)
        found = self._answers.get(digest)
        if found is None:
            return None
        if now >= found[0]:
            del self._answers[digest]
            return None
        return found[1]

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
    """Args: failures: in a row, that open it. open_s: seconds until one is asked again."""

    def __init__(self, failures: int, open_s: float) -> None:
        self._limit, self._open_s = failures, open_s
        self._failures = 0
        self._again_at = 0.0
        self.opened = 0

    @property
    def is_open(self) -> bool:
        """Whether failures have opened it, and no answer has closed it."""
        return self._failures >= self._limit

    def may_ask(self, now: float) -> bool:
        """Whether to ask now. While it is open one may at a time."""
        if not self.is_open:
            return True
        if now < self._again_at:
            return False
        self._again_at = now + self._open_s
        return True

    def answered(self) -> None:
        """An answer came, whatever it says."""
        self._failures = 0

    def failed(self, now: float) -> None:
        """None came, or none that can be read."""
        self._failures += 1
        if self._failures == self._limit:
            self.opened += 1
        if self.is_open:
            self._again_at = now + self._open_s

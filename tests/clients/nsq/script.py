"""The script that each NSQ client plays: what it publishes, and what it has to see as a consumer that finds nsqd by nsqlookupd.

pub        20 messages, each answered by OK, come once
mpub       10 at once, likewise
dpub       one that is delayed by a second comes, and not before
requeue    one that is given back comes again, with its attempts counted
touch      one that is touched is still the client's, and can be finished
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter

CHECKS = ("pub", "mpub", "dpub", "requeue", "touch")
DELAY_MS = 1_000


class Seen:
    """What a consumer saw.

    Args:
        published: names of what was published.
    """

    def __init__(self) -> None:
        self.wanted = [f"pub-{n}" for n in range(20)] + [f"mpub-{n}" for n in range(10)] + ["dpub"]
        self.finished: Counter[str] = Counter()
        self.attempts: Counter[str] = Counter()
        self.delayed_at = self.came_at = 0.0

    def requeues(self, body: str, attempts: int) -> bool:
        """Note a delivery. True: give it back."""
        self.attempts[body] = max(self.attempts[body], attempts)
        if body == "dpub":
            self.came_at = self.came_at or time.monotonic()
        return body == "pub-3" and attempts == 1

    def touches(self, body: str) -> bool:
        """True: touch it before it is finished."""
        return body == "pub-4"

    @property
    def done(self) -> bool:
        """True once everything was finished."""
        return all(self.finished[name] for name in self.wanted)

    def checks(self) -> dict[str, str]:
        """Check → ok, or what went wrong."""
        found = {}
        for kind in ("pub", "mpub", "dpub"):
            names = [name for name in self.wanted if name.split("-")[0] == kind]
            wrong = {name: self.finished[name] for name in names if self.finished[name] != 1}
            found[kind] = f"finished {wrong}" if wrong else "ok"
        late = self.came_at - self.delayed_at
        if found["dpub"] == "ok" and late < DELAY_MS / 1000 - 0.05:
            found["dpub"] = f"came after {late:.2f} s"
        found["requeue"] = "ok" if self.attempts["pub-3"] == 2 else f"attempts {self.attempts['pub-3']}"
        found["touch"] = "ok" if self.finished["pub-4"] == 1 else "not finished"
        return found

    def show(self) -> None:
        """Print the checks."""
        sys.stdout.write(json.dumps(self.checks()) + "\n")

"""pynsq: `python pynsq_client.py TCP_HOST:PORT LOOKUP_HOST:PORT TOPIC`."""

from __future__ import annotations

import sys
import time
from typing import Any

import nsq
import tornado.ioloop
from script import DELAY_MS, Seen

LIMIT_S = 60.0


def main(tcp: str, lookup: str, topic: str) -> None:
    """Play the script."""
    seen, loop = Seen(), tornado.ioloop.IOLoop.current()
    writer = nsq.Writer([tcp])
    sent = 0

    def handle(message: Any) -> bool:
        message.enable_async()
        body = message.body.decode()
        if seen.requeues(body, message.attempts):
            message.requeue(delay=1, backoff=False)
            return True
        if seen.touches(body):
            message.touch()
        message.finish()
        seen.finished[body] += 1
        return True

    def published(_connection: Any, answer: Any) -> None:
        nonlocal sent
        assert answer == b"OK", answer
        sent += 1
        if sent < 20:
            writer.pub(topic, f"pub-{sent}".encode(), published)
        elif sent == 20:
            writer.mpub(topic, [f"mpub-{n}".encode() for n in range(10)], published)
        elif sent == 21:
            seen.delayed_at = time.monotonic()
            writer.dpub(topic, DELAY_MS, b"dpub", published)
        else:
            nsq.Reader(
                topic=topic, channel="work", lookupd_http_addresses=[f"http://{lookup}"], message_handler=handle, max_in_flight=5,
                lookupd_poll_interval=1, lookupd_poll_jitter=0.0,
            )  # fmt: skip

    def look() -> None:
        if seen.done or time.monotonic() > end:
            loop.stop()

    end = time.monotonic() + LIMIT_S
    loop.call_later(0.5, lambda: writer.pub(topic, b"pub-0", published))
    tornado.ioloop.PeriodicCallback(look, 50).start()
    loop.start()
    seen.show()


if __name__ == "__main__":
    main(*sys.argv[1:])

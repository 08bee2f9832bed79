"""pynsq until it is killed: `python pynsq_worker.py produce|consume TCP,… LOOKUP,… TOPIC NAME`. It says each message that it was
told to be stored, or that it got, before it finishes it: a line each.
"""

from __future__ import annotations

import sys
from typing import Any

import nsq
import tornado.ioloop

WINDOW = 20


def say(line: str) -> None:
    """Write a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def produce(tcp: str, topic: str, name: str) -> None:
    """Publish with a window; what fails is published again, under another number."""
    loop, writer = tornado.ioloop.IOLoop.current(), nsq.Writer(tcp.split(","), reconnect_interval=0.2)
    number = 0

    def publish() -> None:
        nonlocal number
        number += 1
        body = f"{name}-{number}"

        def answered(_connection: Any, answer: Any) -> None:
            if answer == b"OK":
                say(body)
            loop.call_later(0.2, publish)

        writer.pub(topic, body.encode(), answered)

    for _ in range(WINDOW):
        loop.call_later(0.2, publish)
    loop.start()


def consume(lookup: str, topic: str) -> None:
    """Consume, and finish each."""

    def handle(message: Any) -> bool:
        say(message.body.decode())
        return True

    nsq.Reader(
        topic=topic, channel="work", lookupd_http_addresses=[f"http://{each}" for each in lookup.split(",")],
        message_handler=handle, max_in_flight=50, lookupd_poll_interval=1, lookupd_poll_jitter=0.0, max_backoff_duration=0.1,
    )  # fmt: skip
    tornado.ioloop.IOLoop.current().start()


if __name__ == "__main__":
    what, tcp_addresses, lookups, topic_name, own_name = sys.argv[1:]
    produce(tcp_addresses, topic_name, own_name) if what == "produce" else consume(lookups, topic_name)

"""The callback that decides about logins dies under 200 logins a second: who is remembered comes in, the rest is refused, those
who are connected notice nothing, and it recovers by itself.

Three phases: the callback answers, hangs (stopped) or is gone (killed), answers again. In each half of the logins are of users
whose answer is remembered, half of users nobody has seen. Meanwhile pairs of clients that are connected send each other messages;
theirs is the latency that is shown. Callback and load have processes of their own. `--how control`: the callback lives in all three
phases, which shows what the machine does by itself.

Estimate: a login is a connection, a CONNECT and a digest, 150 µs of the gateway: 200 a second are 3 % of a core. A callback that
hangs holds at most 64 of them for its time-out until five have failed, then nobody asks. p99 of messages as without.

    python -m benchmarks.logins [--how hang|kill|control] [--seconds 12] [--rate 200]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from benchmarks.harness import cluster, cpu_seconds, free_port
from cluster.access.minting import key_of, token
from pixiu.errors import PixiuError
from pixiu.mqtt.client import ConnectionRefused
from pixiu.mqtt.client_io import MQTTClient
from registry.keys import add_key, use_key

PAIRS = 10
MESSAGES_PER_S = 20
"""Of each pair."""
KNOWN = 400
"""Users whose answers are remembered."""
RULES = '[[rule]]\nallow = ["publish", "subscribe"]\n'


def serve(port: int) -> None:
    """The callback: whoever comes is let in."""

    async def answer(request: web.Request) -> web.Response:
        user = (await request.json())["user"]
        return web.json_response({"allow": True, "user": user, "uin": int(user.removeprefix("u"))})

    app = web.Application()
    app.router.add_post("/", answer)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


@contextlib.asynccontextmanager
async def service(port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """The callback in a process of its own, when it answers."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "benchmarks.logins", "--serve", str(port))
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            await asyncio.sleep(0.05)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def log_in(port: int, user: int, outcomes: Counter[str], kind: str) -> None:
    """One login, and what came of it."""
    client = MQTTClient("127.0.0.1", port, f"c{user}", f"u{user}", password=b"pass-phrase")
    try:
        await client.connect()
        outcomes[f"{kind} let in"] += 1
    except ConnectionRefused as refused:
        outcomes[f"{kind} CONNACK {refused.return_code}"] += 1
    except PixiuError:
        outcomes[f"{kind} closed"] += 1
    finally:
        await client.close()


class Pairs:
    """Clients that are connected, and how long their messages take."""

    def __init__(self) -> None:
        self.took: list[float] = []
        self.lost = 0
        self._sent = 0

    async def run(self, port: int, tokens: list[str]) -> None:
        """Send until it is cancelled."""
        clients = []
        for number, secret in enumerate(tokens):
            client = MQTTClient(
                "127.0.0.1", port, f"pair-{number}", "any", password=secret.encode(), on_message=self._arrived,
                on_disconnect=self._gone,
            )  # fmt: skip
            await client.connect()
            await client.subscribe([f"room/{1000 + number}"])
            clients.append(client)
        for number in itertools.count():
            clients[number % PAIRS].publish(f"room/{1000 + (number + 1) % PAIRS}", repr(time.perf_counter()).encode())
            await asyncio.sleep(1 / (PAIRS * MESSAGES_PER_S))

    def _arrived(self, _topic: str, payload: bytes) -> None:
        self.took.append(time.perf_counter() - float(payload))

    def _gone(self, _error: PixiuError | None) -> None:
        self.lost += 1

    def figures(self) -> str:
        """Latencies since the last call."""
        took, self.took = sorted(self.took), []
        at = [1000 * took[min(int(len(took) * share), len(took) - 1)] if took else 0.0 for share in (0.5, 0.99, 1.0)]
        return f"{len(took):5} messages: p50 {at[0]:5.1f}  p99 {at[1]:6.1f}  longest {at[2]:6.1f} ms"


async def phase(name: str, port: int, seconds: float, rate: int, new: itertools.count[int], pairs: Pairs, pids: list[int]) -> None:
    """So many seconds of logins at the rate; prints what came of them."""
    outcomes: Counter[str] = Counter()
    tasks: set[asyncio.Task[None]] = set()
    before, begin = cpu_seconds(pids), time.monotonic()
    pairs.figures()
    for number in range(int(seconds * rate)):
        await asyncio.sleep(max(begin + number / rate - time.monotonic(), 0))
        user, kind = (1 + number // 2 % KNOWN, "known") if number % 2 else (next(new), "new")
        task = asyncio.create_task(log_in(port, user, outcomes, kind))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    took, figures = time.monotonic() - begin, pairs.figures()
    await asyncio.gather(*tasks)
    said = ", ".join(f"{what} {count}" for what, count in sorted(outcomes.items()))
    cpu = (cpu_seconds(pids) - before) / took
    print(f"{name:<8} {int(seconds * rate) / took:4.0f} logins/s, gateway {cpu:4.0%} of a core | {figures} | {said}", flush=True)


async def measure(how: str, seconds: float, rate: int) -> int:
    """All phases against one cluster. Returns how many clients that were connected have lost their connection."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        key = key_of(folder / "key.pem")
        add_key(folder / "keys")
        use_key(folder / "keys")
        access = folder / "access.toml"
        access.write_text(
            f'[jwt]\nkeys = "keys.json"\n[callback]\nurl = "http://127.0.0.1:{port}/"\ntimeout_s = 1.0\ncache_s = 300.0\n'
            f"open_s = 2.0\n[quota]\nfailed_logins_per_min = 0\n{RULES}"
        )
        settings = (f"cluster.key_dir={folder / 'keys'}", f"gateway.access_file={access}", f"proxy.access_file={access}")
        async with cluster(settings=settings) as running, service(port) as first:
            (mqtt,), pids, pairs, new = running.mqtt_ports, running.pids["gateway"], Pairs(), itertools.count(1_000_000)
            outcomes: Counter[str] = Counter()
            for user in range(1, KNOWN + 1):
                await log_in(mqtt, user, outcomes, "known")
            tokens = [token(key, f"p{number}", 500_000 + number) for number in range(PAIRS)]
            sending = asyncio.create_task(pairs.run(mqtt, tokens))
            await asyncio.sleep(2)
            await phase("before", mqtt, seconds, rate, new, pairs, pids)
            if how != "control":
                first.send_signal(signal.SIGSTOP if how == "hang" else signal.SIGKILL)
            await phase("during", mqtt, seconds, rate, new, pairs, pids)
            async with contextlib.AsyncExitStack() as stack:
                if how == "hang":
                    first.send_signal(signal.SIGCONT)
                elif how == "kill":
                    await stack.enter_async_context(service(port))
                begin = time.monotonic()
                outcomes.clear()
                while not outcomes["new let in"] and time.monotonic() < begin + 30:
                    await log_in(mqtt, next(new), outcomes, "new")
                    await asyncio.sleep(0.05)
                print(f"a new user came in {time.monotonic() - begin:.1f} s after the callback was back", flush=True)
                await phase("after", mqtt, seconds, rate, new, pairs, pids)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            print(json.dumps({"connections lost": pairs.lost}))
            return pairs.lost


def main() -> int:
    """Measure and print. Exit code 1 when somebody who was connected was disconnected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", choices=("hang", "kill", "control"), default="hang")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--rate", type=int, default=200)
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return 0
    return int(asyncio.run(measure(args.how, args.seconds, args.rate)) > 0)


if __name__ == "__main__":
    sys.exit(main())

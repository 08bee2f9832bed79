"""Devices at home: whose they are, their alarms, and a page that shows them live.

    pixiu up                           # in another terminal
    python examples/iot/home.py        # http://127.0.0.1:8088
    python examples/iot/devices.py     # in a third one

Bindings are in memory. `--gateway-http` names a gateway's HTTP API: the end of a binding then ends the user's subscriptions. Where
clients log in, `PIXIU_TOKEN` is the token of this program.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import Any

import aiohttp
import aiohttp.web as web
import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

import pixiu

TARGET = os.environ.get("PIXIU_TARGET", "zk://127.0.0.1:2181/pubsub")
TOKEN = os.environ.get("PIXIU_TOKEN", "")
SMOKE = 0.03
"""Smoke above this is an alarm."""
MAX_WAITING = 1000
"""Events that wait for a page that does not read; further ones are left out."""
MAX_BINDINGS = 100_000


class Home:
    """Bindings of devices to users, and the pages that are open."""

    def __init__(self, px: pixiu.Client, gateway_http: str) -> None:
        self._px, self._gateway_http = px, gateway_http
        self._bound: dict[str, set[str]] = {}
        """Device → users."""
        self._pages: set[asyncio.Queue[str]] = set()
        self._alarms: set[asyncio.Task[None]] = set()

    # --- bindings

    async def bind(self, request: web.Request) -> web.Response:
        """POST /bindings: a user may see a device from now on."""
        user, device = await self._named(request)
        if len(self._bound) >= MAX_BINDINGS:
            raise web.HTTPServiceUnavailable(text=f"there are {MAX_BINDINGS} bindings already")
        self._bound.setdefault(device, set()).add(user)
        return web.json_response({"bound": True})

    async def unbind(self, request: web.Request) -> web.Response:
        """DELETE /bindings: not any more, and what the user has subscribed to ends."""
        user, device = await self._named(request)
        self._bound.get(device, set()).discard(user)
        if self._gateway_http:
            wanted = {"user": user, "filter": f"devices/{device}/#", "reason": "the device was unbound"}
            login = {"Authorization": f"Bearer {TOKEN}"}
            url = f"{self._gateway_http}/v1/revoke"
            async with aiohttp.ClientSession(headers=login) as http, http.post(url, json=wanted) as answer:
                if answer.status != 200:
                    raise web.HTTPBadGateway(text=f"the gateway answered {answer.status} to /v1/revoke")
        return web.json_response({"bound": False})

    async def ask(self, request: web.Request) -> web.Response:
        """POST /ask: the cluster asks whether a user may subscribe to a topic."""
        said = await request.json()
        words = str(said.get("topic", "")).split("/")
        device = words[1] if len(words) == 3 and words[0] == "devices" else ""
        users = self._bound.get(device, set())
        return web.json_response({"allow": bool(users & {str(said.get("user")), str(said.get("uin"))})})

    async def _named(self, request: web.Request) -> tuple[str, str]:
        try:
            said = json.loads(await request.text())
            user, device = said["user"], said["device"]
        except (ValueError, KeyError, TypeError):
            raise web.HTTPBadRequest(text='send {"user": "7001", "device": "device-1"}') from None
        if not isinstance(user, str) or not isinstance(device, str) or not device or set(device) & set("/+#$"):
            raise web.HTTPBadRequest(text="user and device are texts, and a device has none of / + # $")
        return user, device

    # --- what devices say

    def heard(self, topic: str, payload: bytes) -> None:
        """Show a message of a device; smoke is an alarm."""
        _, device, what = topic.split("/", 2)
        said: dict[str, Any] = {"device": device, "what": what}
        if what == "telemetry":
            said["reading"] = reading = json.loads(payload)
            if reading.get("smoke", 0.0) > SMOKE:
                said["alarm"] = True
                task = asyncio.create_task(self._alarm(device, reading["smoke"]))
                self._alarms.add(task)
                task.add_done_callback(self._alarms.discard)
        else:
            said["status"] = payload.decode()
        text = json.dumps(said)
        for page in self._pages:
            if page.qsize() < MAX_WAITING:
                page.put_nowait(text)

    async def _alarm(self, device: str, smoke: float) -> None:
        """Mail in lane 0 goes before all other mail, and waits for devices that are away."""
        for user in self._bound.get(device, ()):
            if user.isdecimal():
                await self._px.user(int(user)).mail(f"smoke at {device}: {smoke}".encode(), lane=0)

    # --- the page

    async def page(self, _request: web.Request) -> web.Response:
        """GET /"""
        return web.Response(text=(Path(__file__).parent / "page.html").read_text(), content_type="text/html")

    async def events(self, request: web.Request) -> web.StreamResponse:
        """GET /events: what devices say, as server-sent events."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        await response.write(b": open\n\n")
        page: asyncio.Queue[str] = asyncio.Queue()
        self._pages.add(page)
        try:
            while True:
                await response.write(f"data: {await page.get()}\n\n".encode())
        except ConnectionError:
            return response
        finally:
            self._pages.discard(page)


def listen(home: Home, host: str, port: int) -> paho.Client:
    """Subscribe to all devices."""
    loop = asyncio.get_running_loop()
    client = paho.Client(CallbackAPIVersion.VERSION2, client_id="home", protocol=MQTTProtocolVersion.MQTTv5)
    client.username_pw_set("home", TOKEN or None)

    def connected(*_: object) -> None:
        client.subscribe([("devices/+/telemetry", 1), ("devices/+/status", 1)])

    def message(_client: paho.Client, _data: object, message: paho.MQTTMessage) -> None:
        loop.call_soon_threadsafe(home.heard, message.topic, bytes(message.payload))

    client.on_connect, client.on_message = connected, message
    client.connect(host, port)
    client.loop_start()
    return client


async def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mqtt-host", default="127.0.0.1")
    parser.add_argument("--mqtt-port", type=int, default=1883)
    parser.add_argument("--port", type=int, default=8088)
    parser.add_argument("--gateway-http", default="")
    asked = parser.parse_args()
    async with pixiu.connect(TARGET, client="home") as px:
        home = Home(px, asked.gateway_http.rstrip("/"))
        app = web.Application()
        app.add_routes([
            web.post("/bindings", home.bind), web.delete("/bindings", home.unbind), web.post("/ask", home.ask),
            web.get("/", home.page), web.get("/events", home.events),
        ])  # fmt: skip
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", asked.port).start()
        client = listen(home, asked.mqtt_host, asked.mqtt_port)
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            client.disconnect()
            client.loop_stop()
            await runner.cleanup()


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        pass

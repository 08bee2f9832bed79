"""Driver of mosquitto_pub and mosquitto_sub, which have no WebSocket. Arguments and output: `tests.clients.script`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from asyncio.subprocess import DEVNULL, PIPE, Process
from typing import ClassVar

from tests.clients.script import WAIT_S, Message, Where, main


class MosquittoClient:
    """A mosquitto_sub for each subscription, a mosquitto_pub for each message; the will is that of a mosquitto_sub. One that
    comes back names its topics again, because the program needs some."""

    _kept: ClassVar[dict[str, list[str]]] = {}
    """Client ID with a session → its topics."""

    def __init__(self, where: Where, name: str) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self._where, self._name = where, name
        self._will: Message | None = None
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._keep = False

    def _common(self) -> list[str]:
        where = self._where
        found = ["-h", where.host, "-p", str(where.port), "-V", "mqttv5" if where.version == "5" else "mqttv311"]
        return [*found, "--cafile", where.ca] if where.transport == "tls" else found

    async def connect(self, will: Message | None = None, keep: bool = False) -> bool:
        self._will, self._keep = will, keep
        if self._name in self._kept:
            await self._listen(self._kept[self._name], 2)
        elif will is not None:
            await self._listen([f"{self._name}/nothing"], 0)
        else:
            await self._run("mosquitto_pub", "-t", f"{self._name}/nothing", "-n", "-q", "1")
        return True

    @property
    def _session(self) -> list[str]:
        expiry = ["-x", "3600"] if self._where.version == "5" else []
        return ["-i", self._name, *(["-c", *expiry] if self._keep else [])]

    async def _run(self, program: str, *arguments: str) -> None:
        process = await asyncio.create_subprocess_exec(program, *self._common(), *arguments, stdout=DEVNULL, stderr=PIPE)
        async with asyncio.timeout(WAIT_S):
            _, text = await process.communicate()
        if process.returncode:
            raise ConnectionRefusedError(text.decode(errors="replace").strip())

    async def _listen(self, topics: list[str], qos: int) -> None:
        will = self._will
        named = [word for topic in topics for word in ("-t", topic)]
        words = [*named, "-q", str(qos), *self._session, "-d", "-F", '{"t":"%t","p":"%x","q":%q,"r":%r}']
        if will is not None:
            # One message ends it with DISCONNECT 0x00; at a signal it would leave its will by 0x04.
            words += ["-C", "1", "--will-topic", will.topic, "--will-payload", will.payload.decode(), "--will-qos", str(will.qos)]
        self._process = process = await asyncio.create_subprocess_exec(
            "stdbuf", "-oL", "mosquitto_sub", *self._common(), *words, stdout=PIPE, stderr=DEVNULL
        )
        assert process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            async for line in process.stdout:
                if line.startswith(b"Subscribed"):
                    codes = [int(code) for code in line.rpartition(b":")[2].split(b",")]
                    if any(code >= 0x80 for code in codes):
                        raise ConnectionRefusedError(f"SUBACK {codes}")
                    break
                self._take(line)  # of a session, from before
            else:
                raise ConnectionRefusedError("mosquitto_sub ended")
        self._reading = asyncio.create_task(self._read(process.stdout))

    async def _read(self, lines: asyncio.StreamReader) -> None:
        async for line in lines:
            self._take(line)

    def _take(self, line: bytes) -> None:
        if line.startswith(b"{"):
            got = json.loads(line)
            self.messages.put_nowait(Message(got["t"], bytes.fromhex(got["p"]), got["q"], bool(got["r"])))

    async def subscribe(self, topic: str, qos: int) -> None:
        if self._keep:
            self._kept.setdefault(self._name, []).append(topic)
            await self._run("mosquitto_sub", "-t", topic, "-q", str(qos), *self._session, "-E")
        else:
            await self._listen([topic], qos)

    async def publish(self, topic: str, payload: bytes, qos: int, retain: bool = False) -> None:
        content = ["-m", payload.decode()] if payload else ["-n"]
        await self._run("mosquitto_pub", "-t", topic, "-q", str(qos), *content, *(["-r"] if retain else []))

    async def _end(self, *, kill: bool) -> None:
        if self._reading is not None:
            self._reading.cancel()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill() if kill else self._process.terminate()
            await self._process.wait()

    async def cut(self) -> None:
        await self._end(kill=True)

    async def disconnect(self) -> None:
        if self._will is not None and self._process is not None:
            await self._run("mosquitto_pub", "-t", f"{self._name}/nothing", "-n", "-q", "1")
            await self._process.wait()
        await self._end(kill=False)


if __name__ == "__main__":
    main(MosquittoClient)

"""`pixiu up` and `pixiu zookeeper`: commands that need the servers' packages, found by the entry-point group `pixiu.commands`.

Source: docs/operations.md.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape

from onebox.children import DieWithParent, child_environment
from onebox.grouping import FLAGS, NUMBERS, PLAIN, Grouping, clients_of, grouping_of
from onebox.screen import Rates, render
from onebox.secure import PRIVATE_UMASK, make_secure, with_login
from onebox.up import TLS, LocalCluster, UpOptions
from pixiu.discovery.login import CREDENTIALS_FILE
from pixiu.rpc.tls import TLS_DIR
from tools.cli.output import DEFAULT_TARGET, EXIT_INTERRUPTED, AsJson, console, error_console, guarded, print_json
from tools.cli.status import read_status
from tools.end_of_input import on_end_of_input

DEFAULTS: Final = UpOptions()
REFRESH_S: Final = 1.0
REPLAY_STOP_S: Final = 10.0


def _number(name: str, text: str) -> Any:
    """Return the option for a number, with its defaults in the help."""
    plain = NUMBERS[PLAIN][name]
    others = [f"--{FLAGS[grouping]}: {numbers[name]}" for grouping, numbers in NUMBERS.items() if numbers[name] != plain]
    return typer.Option(help=f"{text} [default: {'; '.join((str(plain), *others))}]")


@guarded
def up(
    small: Annotated[bool, typer.Option("--small", help="Run one node of everything, without replicas.")] = False,
    separate: Annotated[bool, typer.Option("--separate", help="Run every role as its own process.")] = False,
    proxies: Annotated[int | None, _number("proxies", "Proxies.")] = None,
    gateways: Annotated[int | None, _number("gateways", "Gateways.")] = None,
    brokers: Annotated[int | None, _number("brokers", "Broker partitions, a power of two.")] = None,
    broker_replicas: Annotated[int | None, _number("broker_replicas", "Replicas of each broker partition.")] = None,
    routers: Annotated[int | None, _number("routers", "Router partitions, a power of two.")] = None,
    router_replicas: Annotated[int | None, _number("router_replicas", "Replicas of each router partition.")] = None,
    relays: Annotated[int | None, _number("relays", "Relay partitions, a power of two; 0: no messages to users.")] = None,
    relay_replicas: Annotated[int | None, _number("relay_replicas", "Replicas of each relay partition.")] = None,
    xius: Annotated[int | None, _number("xius", "Xiu partitions, a power of two; 0: no messages are stored.")] = None,
    xiu_replicas: Annotated[int | None, _number("xiu_replicas", "Replicas of each Xiu partition.")] = None,
    pis: Annotated[int | None, _number("pis", "Pi partitions (users' inboxes), a power of two; 0: none.")] = None,
    pi_replicas: Annotated[int | None, _number("pi_replicas", "Replicas of each Pi partition.")] = None,
    topics: Annotated[int | None, _number("topics", "Groups of durable topics, any number; 0: no topics.")] = None,
    topic_replicas: Annotated[int | None, _number("topic_replicas", "Replicas of each group of topics.")] = None,
    admins: Annotated[int | None, _number("admins", "Admins: one changes topics, the others stand by.")] = None,
    mqtt_port: Annotated[int, typer.Option(help="MQTT port of the first gateway, the others follow; 0: any.")] = DEFAULTS.mqtt_port,
    zookeeper_port: Annotated[int, typer.Option(help="Port of the embedded ZooKeeper; 0: any.")] = DEFAULTS.zookeeper_port,
    registry: Annotated[str, typer.Option(help="Use this ZooKeeper, zk://HOST:PORT/ROOT, instead of an embedded one.")] = "",
    data: Annotated[Path, typer.Option(help="Folder for data and logs.", metavar="DIR")] = DEFAULTS.data,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with cluster and role tables.", metavar="FILE", exists=True)
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="ROLE.KEY=VALUE or cluster.KEY=VALUE; may be repeated.")
    ] = None,
    grow: Annotated[
        bool, typer.Option(help="Run the partitions that `pixiu double` adds, and end them when it takes them back.")
    ] = DEFAULTS.grow,
    secure: Annotated[
        bool,
        typer.Option("--secure", help="Create certificates, keys, rules and a token below --data; every login needs a token."),
    ] = DEFAULTS.secure,
    seconds: Annotated[float | None, typer.Option("--for", min=0, help="End after this number of seconds.")] = None,
    until_eof: Annotated[bool, typer.Option("--until-eof", help="End when standard input, a pipe, is closed.")] = False,
    replay: Annotated[
        str, typer.Option(help="Replay this log once all is Running (`sample`: the included one).", metavar="FILE")
    ] = "",
    speed: Annotated[float | None, typer.Option(help="With --replay: factor by which log time passes faster.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a whole cluster on this machine until Ctrl-C: two nodes, each with a replica of every role, and the stores.

    With --replay the exit code is the replay's; the cluster stays until --for is over (and the replay is done), or Ctrl-C.
    """
    os.umask(PRIVATE_UMASK)  # before anything is written: only the owner may read mail, logs and keys
    numbers = {
        "proxies": proxies, "gateways": gateways, "admins": admins, "brokers": brokers, "broker_replicas": broker_replicas,
        "routers": routers, "router_replicas": router_replicas, "relays": relays, "relay_replicas": relay_replicas, "xius": xius,
        "xiu_replicas": xiu_replicas, "pis": pis, "pi_replicas": pi_replicas, "topics": topics, "topic_replicas": topic_replicas,
    }  # fmt: skip
    options = UpOptions.of(
        grouping_of({Grouping.SMALL: small, Grouping.SEPARATE: separate}),
        numbers,
        mqtt_port=mqtt_port,
        zookeeper_port=zookeeper_port,
        registry=registry,
        data=data,
        config=config,
        settings=(*(make_secure(data, replay, clients_of(topics)) if secure else ()), *(settings or ())),
        grow=grow,
        secure=secure,
    )
    options.validate()
    _check_log(replay)
    code = asyncio.run(_Up(options, seconds, replay, speed, as_json=as_json, until_eof=until_eof, secure=secure).run())
    if code:
        raise typer.Exit(code)


def _check_log(replay: str) -> None:
    """Check the log, so that an error is reported before anything starts."""
    if not replay:
        return
    from tools.replay.log import load_log
    from tools.replay.run import SAMPLE

    if replay != SAMPLE:
        load_log(Path(replay))


@guarded
def zookeeper(
    data: Annotated[Path, typer.Option(help="Its folder; created if missing.", metavar="DIR")],
    port: Annotated[int, typer.Option(min=0, max=65_535, help="TCP port; 0: any.")] = 2181,
    host: Annotated[
        str, typer.Option(help="Address that it listens on; it asks nobody for a login.", metavar="ADDRESS")
    ] = "127.0.0.1",
) -> None:
    """Run the embedded ZooKeeper in the foreground until Ctrl-C."""
    from onebox.embedded import main

    code = main(["--data", str(data), "--port", str(port), "--host", host])
    if code:
        raise typer.Exit(2)


class _Up:
    """One run of `pixiu up`: the cluster, the display, the replay, the end."""

    def __init__(
        self,
        options: UpOptions,
        seconds: float | None,
        replay: str,
        speed: float | None,
        *,
        as_json: bool,
        until_eof: bool = False,
        secure: bool = False,
    ) -> None:
        self._secure = secure
        self._seconds = seconds
        self._until_eof = until_eof
        self._replay = replay
        self._speed = speed
        self._as_json = as_json
        self._console: Console = console()
        self._cluster = LocalCluster(options, self._event)
        self._rates = Rates()
        self._interrupts = 0
        self._main: asyncio.Task[int] | None = None
        self._player: asyncio.subprocess.Process | None = None

    async def run(self) -> int:
        """Start the cluster, replay, wait, stop. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted)
        if self._until_eof:
            on_end_of_input(self._interrupted)
        self._main = asyncio.create_task(self._serve())
        try:
            return await self._main
        except asyncio.CancelledError:
            return EXIT_INTERRUPTED if self._replay else 0
        finally:
            if not self._as_json and self._console.is_terminal:
                self._console.print("ending …", style="dim")
            await self._cluster.stop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _serve(self) -> int:
        await self._cluster.start()
        await self._say_problems()
        until = None if self._seconds is None else time.monotonic() + self._seconds
        code = await self._play() if self._replay else 0
        try:
            await self._watch(until)
        except asyncio.CancelledError:
            pass  # Ctrl-C: the usual end; the replay's result stands
        return code

    async def _say_problems(self) -> None:
        """Name what is wrong although all processes are Running, such as a full disk."""
        for problem in (await read_status(self._cluster.target)).problems:
            if self._as_json:
                print_json({"event": "problem", "text": problem})
            else:
                error_console().print(f"[red]✗ {escape(problem)}[/]", highlight=False)

    async def _watch(self, until: float | None) -> None:
        """Show the table until the time is over."""
        live = Live(console=self._console, auto_refresh=False, transient=True) if self._shows_table else None
        if live is not None:
            live.start()
        try:
            while until is None or time.monotonic() < until:
                if live is not None:
                    await self._rates.read(self._cluster)
                    live.update(render(self._cluster, self._rates, until), refresh=True)
                left = REFRESH_S if until is None else min(REFRESH_S, max(until - time.monotonic(), 0.0))
                await asyncio.sleep(left)
        finally:
            if live is not None:
                live.stop()

    @property
    def _shows_table(self) -> bool:
        return not self._as_json and self._console.is_terminal

    async def _play(self) -> int:
        """Run the replay in a process of its own, so that it does not share an interpreter with the supervisor."""
        arguments = ["-m", "tools.cli.main", "replay", self._replay, "--target", self._cluster.target]
        if self._speed is not None:
            arguments += ["--speed", str(self._speed)]
        if self._as_json:
            arguments.append("--json")
        environment = child_environment()
        if self._cluster.zookeeper is not None:
            environment[CREDENTIALS_FILE] = str(self._cluster.zookeeper.credentials.resolve())
        self._player = player = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            preexec_fn=DieWithParent(signal.SIGKILL),
        )
        try:
            return await player.wait()
        finally:
            if player.returncode is None:
                player.terminate()
                try:
                    async with asyncio.timeout(REPLAY_STOP_S):
                        await player.wait()
                except TimeoutError:
                    player.kill()
                    await player.wait()

    def _interrupted(self) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            if self._main is not None:
                self._main.cancel()
        else:
            self._cluster.kill()

    def _event(self, name: str, fields: dict[str, object]) -> None:
        if self._as_json:
            print_json({"event": name, **fields})
            return
        if name == "zookeeper":
            self._console.print(
                f"ZooKeeper at {fields['address']}; starting {_processes_text(len(self._cluster.children))} …", highlight=False
            )
        elif name == "running":
            self._print_addresses()
        elif name == "process_exited":
            text = f"{fields['process']} (pid {fields['pid']}) ended with {_code_text(fields['code'])}; it is started again"
            error_console().print(f"[yellow]{text}[/]", highlight=False)
        elif name == "process_running" and fields["restarts"]:
            error_console().print(f"[green]{fields['process']} (pid {fields['pid']}) is Running again[/]", highlight=False)
        elif name == "replicas":
            self._console.print(f"{fields['role']}: {fields['replicas']} replicas are wanted now", highlight=False)
        elif name == "replicas_refused":
            text = f"{fields['replicas']} replicas of {fields['role']}: one machine runs at most {fields['limit']} of all roles"
            error_console().print(f"[red]{text}[/]", highlight=False)
        elif name == "small_tables":
            text = (
                f"{fields['free_mb']} MiB of shared memory are free: each Xiu keeps {fields['table_mb']} MiB of its newest records "
                "there; enlarge it (a container: --shm-size), or set xiu.table_mb"
            )
            error_console().print(f"[yellow]{text}[/]", highlight=False)
        elif name == "process_failed":
            error_console().print(f"[red]{fields['process']} cannot be started: {fields['error']}[/]", highlight=False)

    def _print_addresses(self) -> None:
        found = self._cluster.addresses()
        out = self._console
        count = len(self._cluster.children)
        running = "the process is" if count == 1 else f"all {count} processes are"
        out.print(f"[green]✓ {running} Running[/]", highlight=False)
        out.print(f"  registry  {self._cluster.target}", highlight=False)
        for name in ("proxies", "gateways", "mqtt"):
            out.print(f"  {name:<9} {'  '.join(found[name])}", highlight=False)
        out.print(f"  logs      {self._cluster.options.data / 'logs'}", highlight=False)
        tries = tries_of(self._cluster.options, found["mqtt"])
        if self._secure:
            tries = with_login(tries, self._cluster.options.data)
        if self._cluster.target != DEFAULT_TARGET:
            tries.insert(0, f"export PIXIU_TARGET={self._cluster.target}")
        if self._cluster.options.secure:
            tries.insert(0, f"export {TLS_DIR}={(self._cluster.options.data / TLS).resolve()}")
        for number, line in enumerate(tries):
            out.print(f"  {'try' if number == 0 else '':<9} {line}", highlight=False)


def tries_of(options: UpOptions, mqtt: Sequence[str]) -> list[str]:
    """Commands that a new user may try; `mqtt`: addresses of gateways."""
    tries = ["pixiu listen --room 42", 'pixiu send --room 42 "hello"']
    if options.pis:
        tries += ['pixiu send --mail --user 7 "kept for you"', "pixiu inbox list 7"]
    if options.topics:
        tries.append("pixiu topic create orders --if-missing && echo hello | pixiu topic write orders")
    tries.append("pixiu status")
    if mqtt:
        host, _, port = mqtt[0].rpartition(":")
        tries.append(f"mosquitto_sub -h {host} -p {port} -t room/42")
    return tries


def _processes_text(count: int) -> str:
    return f"{count} process{'' if count == 1 else 'es'}"


def _code_text(code: object) -> str:
    if isinstance(code, int) and code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            pass
    return f"exit code {code}"

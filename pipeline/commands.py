"""Run Spark jobs on what the cluster stores.

`pixiu pipeline JOB …` runs them on this machine, or, with `--master`, on a cluster of Spark. So does `python -m pipeline JOB …`,
which `spark-submit` runs as well.

Source: docs/pipeline.md.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from pipeline.folders import is_connect
from pipeline.reading import problem_of, sentence_of, write_tables
from pipeline.report import when
from pipeline.session import open_session
from pixiu.errors import InvalidArgument, PixiuError, Unavailable
from pixiu.version import __version__
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, Yes, console, error_console, guarded, operator, print_json, print_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.report import Report

EXIT_FOUND: Final = 1
"""The job ran, and found something."""
LAST_BYTES: Final = 4096
pipeline = typer.Typer(help="Run Spark jobs on what the cluster stores.", no_args_is_help=True)
Master = Annotated[
    str,
    typer.Option("--master", help="Master of Spark, or sc://… of Spark Connect [default: this machine].", metavar="URL"),
]
Out = Annotated[str, typer.Option("--out", help="Write all rows here as Parquet.", metavar="FOLDER")]
Html = Annotated[Path | None, typer.Option("--html", help="Write the report as one page.", metavar="FILE")]
Run = Callable[[Any], tuple["Report", dict[str, Any]]]


@contextmanager
def _session(job: str, master: str) -> Iterator[Any]:
    """Open a session for the block; PIXIU_KEEP_SESSION keeps it afterwards."""
    with _quiet_java(), error_console().status(f"starting Spark for {job}…"):
        keep = "PIXIU_KEEP_SESSION" in os.environ
        spark = open_session(f"pixiu {job}", master, brief=not keep)
        _silence(spark)
    try:
        yield spark
    finally:
        if not keep:
            spark.stop()


@contextmanager
def _quiet_java() -> Iterator[None]:
    """Give a Java that is started in the block another stderr: what it and Spark print there is no sentence for a user. Ours stays
    where it was. If the start fails, the last line that was printed is part of the error."""
    try:
        ours = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # replaced, by a test or a notebook
        ours = -1
    with tempfile.TemporaryFile() as printed:
        kept = os.dup(2)
        os.set_inheritable(kept, False)
        os.dup2(printed.fileno(), 2)
        before = sys.stderr
        if ours == 2:
            sys.stderr = os.fdopen(os.dup(kept), "w", encoding=before.encoding, errors="backslashreplace", buffering=1)
        try:
            yield
        except PixiuError:
            raise
        except Exception as error:
            printed.seek(max(0, printed.seek(0, os.SEEK_END) - LAST_BYTES))
            lines = printed.read().decode(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "")
            raise Unavailable(f"Spark did not start: {sentence_of(error)}{f' ({last})' if last else ''}") from None
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            if sys.stderr is not before:
                sys.stderr.close()
                sys.stderr = before


def _silence(spark: Any) -> None:
    """Log nothing: errors become one sentence."""
    from pyspark.logger import PySparkLogger

    if not is_connect(spark):
        spark.sparkContext.setLogLevel("OFF")
    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        PySparkLogger.getLogger(name).disabled = True


def run_job(
    job: str, run: Run, *, master: str, as_json: bool, out: str, html: Path | None, about: Mapping[str, object] | None = None
) -> None:
    """Run a job and report its result, and what it was about. Any error becomes one sentence and exit code 2."""
    began = time.monotonic()
    try:
        with _session(job, master) as spark, error_console().status(f"{job} runs…"):
            report, tables = run(spark)
            if out:
                write_tables(spark, tables, out)
    except PixiuError:
        raise
    except Exception as error:
        raise problem_of(error) from None
    made = {"version": __version__, "made_at": when(time.time_ns() // 1000), "time_zone": "UTC"}
    report.facts = {**(about or {}), **made, **report.facts, "seconds": round(time.monotonic() - began, 1)}
    if html is not None:
        report.write_html(html)
    if as_json:
        print_json(report.to_json(), indent=2)
    else:
        report.show(console())
    if report.findings:
        raise typer.Exit(EXIT_FOUND)


def _needs_folder(html: Path | None) -> None:
    if html is not None and not html.parent.is_dir():
        raise InvalidArgument(f"--html {html}: there is no folder {html.parent}")


@pipeline.command()
@guarded
def audit(
    target: Target = DEFAULT_TARGET,
    settle: Annotated[int, typer.Option(min=0, help="Leave out what was stored less than this number of seconds ago.")] = 60,
    window: Annotated[
        int, typer.Option(min=1, max=86_400, help="Look at what was stored less than this number of seconds ago.")
    ] = 82_800,
    unacked: Annotated[int, typer.Option(min=0, help="Report mail that nobody acknowledged for this number of seconds.")] = 3600,
    sends: Annotated[
        str, typer.Option(help="File of (msg_id, uin) that were confirmed to senders as stored.", metavar="FILE")
    ] = "",
    receipts: Annotated[str, typer.Option(help="File of (msg_id, uin) that receivers received.", metavar="FILE")] = "",
    master: Master = "",
    out: Out = "",
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Compare what is stored, what inboxes list and what was acknowledged. Exit code 1: something does not match."""
    from pipeline.jobs import audit as job

    _needs_folder(html)
    options = job.AuditOptions(target, settle, window, unacked, sends, receipts)
    about = {"target": target}
    run_job("audit", lambda spark: job.run(spark, options), master=master, as_json=as_json, out=out, html=html, about=about)


@pipeline.command()
@guarded
def skew(
    target: Annotated[
        str,
        typer.Option(
            "--target",
            "-t",
            help="The cluster whose stored mail is counted [default: PIXIU_TARGET, unless --log].",
            metavar="TARGET",
            show_default=False,
        ),
    ] = "",
    log: Annotated[str, typer.Option(help="Count this log instead: JSON lines, CSV or Parquet.", metavar="FILE")] = "",
    key: Annotated[str, typer.Option(help="The log's column that names the room or user.")] = "room",
    partitions: Annotated[
        int,
        typer.Option(
            min=0, max=128, help="Partitions now, a power of two [default: what the cluster has; 2 for a log].", show_default=False
        ),
    ] = 0,
    top: Annotated[int, typer.Option(min=1, max=10_000, help="Number of the hottest keys to report.")] = 20,
    master: Master = "",
    out: Out = "",
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Report hot rooms and users, loads of partitions at n, 2n and 4n, and a verdict: leave, double, or VRooms."""
    from pipeline.jobs import skew as job

    _needs_folder(html)
    target = target or ("" if log else os.environ.get("PIXIU_TARGET", ""))
    options = job.SkewOptions(target, log, key, partitions, top)
    about = {"target": target} if target else {"log": log}
    run_job("skew", lambda spark: job.run(spark, options), master=master, as_json=as_json, out=out, html=html, about=about)


@pipeline.command()
@guarded
def latency(
    traces: Annotated[str, typer.Argument(help="Folder or files of traces (gateway.trace_dir).", metavar="TRACES")],
    minute: Annotated[bool, typer.Option("--minute", help="Report by minute, too.")] = False,
    master: Master = "",
    out: Out = "",
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Report percentiles of the time inside each hop and on each link."""
    from pipeline.jobs import latency as job

    _needs_folder(html)
    options = job.LatencyOptions(traces, minute)
    about = {"traces": traces}
    run_job("latency", lambda spark: job.run(spark, options), master=master, as_json=as_json, out=out, html=html, about=about)


@pipeline.command()
@guarded
def archive(
    path: Annotated[str, typer.Argument(help="Folder, or any path that Spark knows.", metavar="PATH")],
    target: Target = DEFAULT_TARGET,
    verify: Annotated[bool, typer.Option("--verify", help="Archive nothing; check the archive that is there.")] = False,
    compact: Annotated[bool, typer.Option("--compact", help="Archive nothing; join small batches into large ones.")] = False,
    keep: Annotated[
        float, typer.Option("--keep", min=0, help="With --compact: hours for which replaced files stay for readers.")
    ] = 1.0,
    rows: Annotated[int, typer.Option(min=1, help="Most rows of a batch.")] = 1_000_000,
    mib: Annotated[int, typer.Option(min=1, help="Most MiB of a batch, by the size of the messages before it.")] = 1024,
    reader: Annotated[str, typer.Option(help="Name by which retention waits for this archive.", metavar="NAME")] = "archive",
    accept_loss: Annotated[bool, typer.Option("--accept-loss", help="Continue without messages that Xiu no longer has.")] = False,
    master: Master = "",
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Archive stored mail as Parquet, by day: what is new since the last run. Exit code 1: something in the archive is damaged."""
    from pipeline.archive import archive as job
    from pipeline.archive import compact as compaction

    _needs_folder(html)
    if verify and compact:
        raise InvalidArgument("--verify or --compact, not both")
    options = job.ArchiveOptions(target, path.rstrip("/"), rows, mib << 20, reader, accept_loss)

    def work(spark: Any) -> tuple[Report, dict[str, Any]]:
        if compact:
            return compaction.run(spark, options.path, lambda: time.time_ns() // 1000, keep_h=keep)
        return (job.verify(spark, options.path), {}) if verify else job.run(spark, options)

    about = {} if verify or compact else {"target": target}
    run_job("archive", work, master=master, as_json=as_json, out="", html=html, about=about)


@pipeline.command()
@guarded
def restore(
    path: Annotated[str, typer.Argument(help="Folder of the archive.", metavar="PATH")],
    reason: Annotated[str, typer.Option("--reason", help="Reason, for the leaders' audit logs.")],
    partitions: Annotated[str, typer.Option(help="Partitions of Xiu, like 0,1 [default: all that the archive has].")] = "",
    cluster: Annotated[
        str, typer.Option(help="Cluster of the archive, where the registry was lost and created again.", metavar="ID")
    ] = "",
    yes: Yes = False,
    target: Target = DEFAULT_TARGET,
    master: Master = "",
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Restore an archive into partitions of Xiu that lost their storage, under the messages' own MsgIDs. Another run continues."""
    from pipeline.archive import restore as job

    _needs_folder(html)
    wanted = _names(partitions)
    if not all(each.isdigit() for each in wanted):
        raise InvalidArgument(f"--partitions {partitions}: numbers with commas, like 0,1")
    options = job.RestoreOptions(target, path.rstrip("/"), tuple(map(int, wanted)), operator(), reason, cluster=cluster)
    if not yes:
        what = f"partitions {partitions}" if wanted else "every partition that the archive has"
        typer.confirm(
            f"Restore {what} from {path} into {target}? Messages that are missing both there and in the archive are given up",
            abort=True,
        )
    about = {"target": target}
    run_job("restore", lambda spark: job.run(spark, options), master=master, as_json=as_json, out="", html=html, about=about)


@pipeline.command()
@guarded
def retention(
    path: Annotated[str, typer.Argument(help="Folder of the archive.", metavar="PATH")],
    reason: Annotated[str, typer.Option("--reason", help="Reason, for the leaders' audit logs.")],
    older_than: Annotated[float, typer.Option(min=0, help="Hours; newer messages stay.")] = 24.0,
    unread: Annotated[
        bool, typer.Option("--unread", help="Trim also what a device has not acknowledged; that device never gets it.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what could be trimmed; trim nothing.")] = False,
    reader: Annotated[str, typer.Option(help="Name that the archive was made with.", metavar="NAME")] = "archive",
    yes: Yes = False,
    target: Target = DEFAULT_TARGET,
    master: Master = "",
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Trim from Xiu what is archived, verified and acknowledged. Exit code 1: some of it is not archived and was kept."""
    from pipeline.archive import retention as job

    _needs_folder(html)
    options = job.RetentionOptions(target, path.rstrip("/"), operator(), reason, older_than, unread, dry_run, reader)
    if not (yes or dry_run):
        typer.confirm(f"Trim what is in {path} and older than {older_than:g} hours from {target}?", abort=True)
    about = {"target": target}
    run_job("retention", lambda spark: job.run(spark, options), master=master, as_json=as_json, out="", html=html, about=about)


@pipeline.command()
@guarded
def find(
    path: Annotated[str, typer.Argument(help="Folder of the archive.", metavar="PATH")],
    msg_ids: Annotated[list[str], typer.Argument(help="Decimal, or hex with 0x.", metavar="MSG_ID…")],
    as_json: AsJson = False,
) -> None:
    """Show messages in the archive's files, by MsgID; needs no Spark and no cluster. Exit code 1: some were not found."""
    from pipeline.archive.archived import read_messages

    wanted = [_number(text) for text in msg_ids]
    found = {row["msg_id"]: row for row in read_messages(path, wanted).to_pylist()}
    rows = [found[each] for each in wanted if each in found]
    missing = [each for each in wanted if each not in found]
    shown = [{name: _plain(value) for name, value in row.items()} for row in rows]
    if as_json:
        print_json({"messages": shown, "missing": missing}, indent=2)
    else:
        for row in shown:
            console().print(" ".join(f"{name}={value}" for name, value in row.items()), markup=False, highlight=False)
    if missing:
        error_console().print(f"not in {path}: {', '.join(map(str, missing))}", markup=False, highlight=False)
        raise typer.Exit(EXIT_FOUND)


def _number(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        raise InvalidArgument(f"{text!r} is not a MsgID: give a whole number, decimal or hex with 0x") from None


def _plain(value: object) -> object:
    """A column for a terminal or JSON. Bytes that are no text are hex."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value.hex()
    return value if isinstance(value, int) else None if value is None else str(value)


@pipeline.command()
@guarded
def record(
    pattern: Annotated[
        str, typer.Argument(help="A filter of topics, such as telemetry/#, or room/N, room/N-M.", metavar="PATTERN")
    ],
    topic: Annotated[str, typer.Option(help="The durable topic; made if it is missing.")],
    file: Annotated[Path, typer.Option(help="The file of routes that proxies and bridges read.", metavar="FILE")] = Path(
        "routes.toml"
    ),
    only: Annotated[bool, typer.Option("--only", help="Clients get these messages no more.")] = False,
    name: Annotated[str, typer.Option(help="Of the route [default: record-TOPIC].")] = "",
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Have messages of topics or rooms stored in a durable topic, which format("pixiu") reads."""
    import asyncio

    import pixiu
    from pipeline import recording

    write = importlib.import_module("cluster.routes.recording").record  # the servers' own file; the pipeline is a client otherwise

    async def make() -> None:
        async with pixiu.connect(target, client="pixiu-record") as px:
            await px.topics.create(topic, if_missing=True)

    asyncio.run(make())
    route, _ = write(file, pattern, topic, deliver=not only, name=name)
    files = recording.files_of(target)
    if as_json:
        print_json({"route": route, "topic": topic, "file": str(file), "proxies_read": files})
        return
    clients = "" if only else "; clients get them from it: processes of bridges read the same file (bridge.routes)"
    print_text(f"{route}, in {file}: {pattern} is stored in {topic}{clients}")
    print_text(recording.read_by(file, files))


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


@pipeline.command()
@guarded
def ingest(
    path: Annotated[str, typer.Argument(help="Where windows and the checkpoint are kept.", metavar="PATH")],
    fields: Annotated[str, typer.Option(help='Of the JSON: "ts timestamp, device string, temp double".')],
    time_field: Annotated[str, typer.Option("--time", help="The field that windows go by.")],
    values: Annotated[str, typer.Option(help="Fields that are summed up, like temp,humidity.")],
    topic: Annotated[str, typer.Option(help="Durable topic to read.", metavar="TOPIC")] = "",
    users: Annotated[str, typer.Option(help="Or UINs whose mail to read, like 7,8.")] = "",
    keys: Annotated[str, typer.Option(help="Fields to group by, like device.")] = "",
    window: Annotated[str, typer.Option(help="Of time.")] = "1 minute",
    target: Target = DEFAULT_TARGET,
    master: Master = "",
    out: Out = "",
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Sum up JSON of a durable topic, or of a user's mail, in windows of time: what is new since the last run."""
    from pipeline.jobs import ingest as job

    _needs_folder(html)
    options = job.IngestOptions(
        target, path.rstrip("/"), users, fields, time_field, _names(keys), _names(values), window, topic=topic
    )  # fmt: skip
    about = {"target": target, "path": path}
    run_job("ingest", lambda spark: job.run(spark, options), master=master, as_json=as_json, out=out, html=html, about=about)


@pipeline.command()
@guarded
def reading(
    path: Annotated[str, typer.Argument(help="Where snapshots are kept.", metavar="PATH")],
    cohort: Annotated[str, typer.Option(help="Interval of arrival by which mail is grouped.")] = "1 hour",
    target: Target = DEFAULT_TARGET,
    master: Master = "",
    out: Out = "",
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Report the time until mail is read, and what is unread, from a snapshot of acknowledgements at each run."""
    from pipeline.jobs import reading as job

    _needs_folder(html)
    options = job.ReadingOptions(target, path.rstrip("/"), cohort)
    about = {"target": target, "path": path}
    run_job("reading", lambda spark: job.run(spark, options), master=master, as_json=as_json, out=out, html=html, about=about)

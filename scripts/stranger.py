"""Plays a stranger, who has the site of the documentation and a clone of the repository: the tutorial, every command as printed.

    make stranger                          # builds the site, and plays it: some minutes
    python -m scripts.stranger build/site

The commands are read from the HTML page, and played as `scripts/newcomer.py` plays README: every one is in `PLAYED` or, with the
reason why not, in `NAMED`. Three machines are network namespaces, which the page itself makes.
"""

from __future__ import annotations

import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

from scripts.newcomer import (
    CANNOT,
    DRAWING,
    INLINE,
    ROLES,
    SHELL,
    Directions,
    Play,
    Step,
    each_once,
    follow,
    log,
    own_network,
    parser_of,
    steps_of_block,
)

PAGE: Final = "tutorial.html"
PX: Final = ".venv/bin/pixiu"
NODE: Final = (
    "ip netns exec machine{0} .venv/bin/python -m node --config three.toml --set host=10.0.0.{0}     "
    "--set gateway.mqtt_host=10.0.0.{0} --set data_dir=run/three/{0} &"
)
CERTIFICATES: Final = ("xiu", "pi", "topic", "router", "relay", "broker", "admin", "proxy", "gateway", "operator")
LAYOUT: Final = (
    *(f"{role}=1x3" for role in ("router", "broker", "relay", "xiu", "pi", "topic")),
    "proxy=3",
    "gateway=3",
    "admin=3",
)
DONE: Final = Play()
PLAYED: Final[dict[str, Play]] = {
    "make run": Play(stays=True, shows=("are Running", "every promise was kept")),
    f"{PX} status": Play(again=True, shows=(*(f"(?m)^{role} " for role in ROLES), "✓ healthy")),
    "# first_message.py": Play(saved=True),
    ".venv/bin/python first_message.py": Play(shows=("b'hello'",)),
    f"{PX} listen --room 42 &": Play(stays=True, shows=("Ctrl-C ends",), later=("room 42 .*: hello from a terminal\n",)),
    f'{PX} send --room 42 "hello from a terminal"': Play(shows=("accepted",)),
    f'{PX} send --mail --user 7 "kept for you"': Play(shows=("replicated",)),
    f"{PX} inbox list 7": Play(shows=("kept for you",)),
    "# first_mail.py": Play(saved=True),
    ".venv/bin/python first_mail.py": Play(shows=("b'kept for you'",)),
    f"{PX} inbox devices 7": Play(shows=("phone",)),
    f"{PX} topic create orders --parts 2": Play(shows=("orders: 2 parts",)),
    f"{PX} topic write orders --count 1000": Play(shows=("stored: 1,?000 messages",)),
    f"{PX} topic read orders": Play(shows=(r"(?m)^[12]:0\t",)),
    "# first_topic.py": Play(saved=True),
    ".venv/bin/python first_topic.py": Play(shows=("billed 1001 orders",)),
    f"{PX} topic show orders": Play(shows=("(?m)^part ", "billing")),
    f"{PX} double broker --dry-run": Play(shows=("broker: 1 → 2 partitions",)),
    f"{PX} double broker --yes": Play(shows=("broker",)),
    f"{PX} layout show": Play(shows=("broker",)),
    "# first_job.py": Play(saved=True),
    ".venv/bin/python first_job.py": Play(shows=(r"\| *1\|", r"\| *2\|")),
    f"{PX} pipeline audit": Play(shows=("Audit of mail", "entries")),
    "sh examples/three_machines/network.sh": Play(alone=True),
    f"{PX} pki init --ca run/three/pki": DONE,
    f"{PX} pki issue --ca run/three/pki --out run/three/tls {' '.join(CERTIFICATES)}": DONE,
    f"{PX} keys add --dir run/three/keys": DONE,
    f"{PX} keys use --dir run/three/keys": DONE,
    "# three.toml": Play(saved=True),
    f"{PX} zookeeper --data run/three/zookeeper --host 10.0.0.254 &": Play(stays=True, shows=("ZooKeeper serves",)),
    "export PIXIU_TARGET=zk://10.0.0.254:2181/three": DONE,
    "export PIXIU_CLUSTER_TLS_DIR=run/three/tls": DONE,
    f"{PX} layout set {' '.join(LAYOUT)}": DONE,
    **{NODE.format(number): Play(stays=True) for number in (1, 2, 3)},
    f'{PX} send --mail --user 8 "on two disks"': Play(shows=("replicated",)),
    "ip link set cable3 down": DONE,
    f'{PX} send --mail --user 8 "machine 3 is gone"': Play(shows=("replicated",)),
    f"{PX} inbox list 8": Play(shows=("on two disks", "machine 3 is gone")),
    "ip link set cable3 up": DONE,
}
"""Directions by command, or by the first line of a snippet."""

NAMED: Final[dict[str, str]] = {
    "git clone …": "the folder is a copy of the repository",
    "cd pixiu": "every command runs in it",
    "unshare --map-root-user --net --mount bash": "all is played in such a shell",
}
"""Items that are not played, with the reason."""

STRANGER: Final = Directions(PAGE, PLAYED, NAMED)


class _Reader(HTMLParser):
    """Finds blocks of code and commands in the text of an article."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[Step] = []
        self.inline: list[Step] = []
        self._language = DRAWING
        self._in: list[str] = []
        self._text: list[str] = []
        self._line = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin a block, or code in the text."""
        words = (dict(attrs).get("class") or "").split()
        if tag == "div" and "highlight" in words:
            self._language = next((word.removeprefix("language-") for word in words if word.startswith("language-")), DRAWING)
        if tag == "pre" and "mermaid" in words:
            self._language = DRAWING
        if tag in ("article", "pre", "code"):
            self._in.append(tag)
        if tag == "code":
            self._text, self._line = [], self.getpos()[0]

    def handle_endtag(self, tag: str) -> None:
        """End a block, or code in the text."""
        if self._in[-1:] != [tag]:
            return
        self._in.pop()
        text = "".join(self._text)
        if tag != "code" or "article" not in self._in:
            return
        if "pre" in self._in:
            self.blocks += steps_of_block(self._line, DRAWING if self._language == "text" else self._language, text)
        elif command := INLINE.fullmatch(f"`{text}`"):
            self.inline.append(Step(self._line, SHELL, " ".join(command[1].split())))

    def handle_data(self, data: str) -> None:
        """Collect the text of code."""
        self._text.append(data)


def steps_of_page(html: str) -> list[Step]:
    """Return every command and snippet of a page of the site, in reading order, without comments; those in the text once, unless
    a block has them."""
    reader = _Reader()
    reader.feed(html)
    typed = {step.text for step in reader.blocks}
    more = [step for step in each_once(reader.inline) if step.text not in typed]
    return sorted((*reader.blocks, *more), key=lambda step: step.line)


def main() -> int:
    """Play the site's tutorial. Returns the exit code."""
    parser = parser_of(__doc__ or "")
    parser.add_argument("site", type=Path, help="folder of the built site")
    arguments = parser.parse_args()
    arguments.brief = True  # what is installed for `make run` is enough
    if arguments.folder is None and not (own_network() and shutil.which("ip")):
        log("no network of its own is allowed here, or iproute2 is missing")
        return CANNOT
    html = (arguments.site / PAGE).read_text()
    return follow(steps_of_page(html), STRANGER, arguments, ["-m", "scripts.stranger", str(arguments.site.resolve())])


if __name__ == "__main__":
    sys.exit(main())

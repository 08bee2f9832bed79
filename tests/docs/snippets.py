"""Snippets of the pages for readers: where they are, and what is wrong with each.

Nothing is started: Python is compiled, and names, arguments and results are looked up in the real modules; command lines are
parsed by the real commands; configuration is read by the loader of the options.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import re
import shlex
import tomllib
import types
import typing
from collections.abc import AsyncIterable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import typer

import pixiu
from bridge.catalog import read_bridges
from cluster.access.settings import parse
from cluster.routes.routes import routes_of
from cluster.settings.options import load_options
from cluster.trust.key_folder import add_key, use_key
from cluster.trust.pki import issue, make_authority
from node.options import load as load_node
from pixiu.discovery.paths import ROLES
from pixiu.errors import ConfigurationError
from tools.cli.main import application

ROOT: Final = Path(__file__).resolve().parents[2]
PLACES: Final = ("*.md", "docs/*.md", "*/README.md", "examples/*/README.md")
PAGES: Final = tuple(
    str(path.relative_to(ROOT))
    for place in PLACES
    for path in sorted(ROOT.glob(place))
    if path.parent.name[:1] != "."  # a cache of some tool
)
RECORDS: Final = tuple(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs/decisions").glob("*.md")))
"""The decisions, which describe what was measured."""
READ_FOR_NAMES: Final = tuple(page for page in PAGES if page != "CHANGELOG.md" and "do not edit" not in (ROOT / page).read_text())
"""Pages whose text says what there is: not what was removed, and not what a script writes."""
DRAWINGS: Final = ("", "mermaid")
"""Languages of fences that hold drawings and output."""
OTHERS: Final = {
    *("cd", "curl", "export", "git", "go", "mosquitto_pub", "mosquitto_sub", "npm", "pip", "protoc", "sudo", "touch"),
    *("buildah", "debootstrap", "helm", "ip", "journalctl", "kubectl", "podman", "sha256sum", "ssh-keygen", "systemctl", "unshare"),
}
"""Programs of somebody else that a snippet may call."""
FENCE: Final = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INLINE: Final = re.compile(r"`((?:pixiu|python|make) [^`]+)`")
LONG_OPTION: Final = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
CALL: Final = re.compile(r"`(?:await |async with )?((?:pixiu\.(?!v1)|px\.)[^`]+)`")
OPTION: Final = re.compile(rf"`(?:--set )?({'|'.join(sorted(ROLES))})\.([a-z0-9_]+)")


class Snippet(NamedTuple):
    """What stands between two fences."""

    page: str
    line: int
    language: str
    text: str


@cache
def snippets() -> tuple[Snippet, ...]:
    """Every snippet of every page."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        for match in FENCE.finditer(text):
            found.append(Snippet(page, text.count("\n", 0, match.start()) + 1, match[1], match[2]))
    return tuple(found)


def prose(page: str) -> str:
    """A page without its snippets."""
    return FENCE.sub("", (ROOT / page).read_text())


def indented_code(page: str) -> list[str]:
    """Lines that Markdown takes for code because of four spaces after an empty line: no language, so nothing checks them."""
    lines, found, in_list = prose(page).split("\n"), [], False
    for before, line in zip(["", *lines], lines, strict=False):
        in_list = bool(re.match(r" *([-*]|\d+\.) ", line)) or (in_list and (line.startswith(" ") or not line))
        if line.startswith("    ") and not before.strip() and not in_list:
            found.append(line)
    return found


def files_of_processes(folder: Path) -> dict[str, Path]:
    """Files that a process reads at its start, by the options that name them."""
    if not (folder / "listeners").exists():
        make_authority(folder / "listeners")
    issued = issue(folder / "listeners", "gateway", folder / "shown", hosts=["localhost"])
    texts = {
        "access_file": '[callback]\nurl = "https://h/"\n',
        "routes": "",
        "bridges": '[a]\nkind = "to-webhook"\ntopic = "t"\nurl = "http://h/"\n',
    }
    for key, text in texts.items():
        (folder / f"{key}.toml").write_text(text)
    return {"tls_certificate": issued, "client_ca": folder / "shown/ca.pem", **{key: folder / f"{key}.toml" for key in texts}}


def problems_of_toml(text: str, folder: Path) -> list[str]:
    """What the options' loader says, for each role that the file has a table for. Its keys and certificates are the test's."""
    if text.startswith("# access.toml"):  # an access file, which is none of a process's options
        try:
            parse(text, "access.toml")
        except ConfigurationError as error:
            return [str(error)]
        return []
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return [str(error)]
    if text.startswith("# routes.toml"):
        try:
            routes_of(tables, "routes.toml")
        except ConfigurationError as error:
            return [str(error)]
        return []
    if all(isinstance(table, dict) and "kind" in table for table in tables.values()):  # a file of bridges
        (folder / "bridges.toml").write_text(text)
        try:
            read_bridges(folder / "bridges.toml")
        except ConfigurationError as error:
            return [str(error)]
        return []
    key_dir = tables.get("cluster", {}).get("key_dir")
    if key_dir:
        add_key(folder / "keys")
        use_key(folder / "keys")
        text = text.replace(key_dir, str(folder / "keys"))
    for key, file in files_of_processes(folder).items():
        for named in {table[key] for table in tables.values() if isinstance(table, dict) and table.get(key)}:
            text = text.replace(f'"{named}"', f'"{file}"')
    tls_dir = tables.get("cluster", {}).get("tls_dir")
    if tls_dir:
        make_authority(folder / "ca")
        for role in ROLES:
            issue(folder / "ca", role, folder / "tls")
        text = text.replace(tls_dir, str(folder / "tls"))
    (folder / "snippet.toml").write_text(text)
    found = []
    for role in ["node"] if "node" in tables else [name for name in tables if name in ROLES] or ["broker"]:
        try:
            if role == "node":
                load_node(folder / "snippet.toml", {}, {})
            else:
                load_options(role, importlib.import_module(f"{role}.options").Options, folder / "snippet.toml", {}, {})
        except ConfigurationError as error:
            found.append(str(error))
    return found


@cache
def _commands() -> Any:
    return typer.main.get_command(application())


def _command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words name, and the words behind its name."""
    command = _commands()
    while hasattr(command, "commands") and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    return command, words


def problems_of_line(line: str) -> list[str]:
    """What is wrong with a line of a shell snippet."""
    words = [word for word in shlex.split(line, comments=True) if word != "&"]
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if not words:
        return []
    program, rest = Path(words[0]).name, words[1:]
    if program == "pixiu":
        command, arguments = _command(rest)
        if hasattr(command, "commands"):
            return [f"{line}: no such command"]
        try:
            command.make_context("pixiu", arguments)
        except Exception as error:  # every kind of wrong use that the parser knows
            return [f"{line}: {type(error).__name__} {getattr(error, 'message', error)}"]
        return []
    if program == "make":
        return [f"{line}: no such target" for word in rest if "=" not in word and word not in _targets()]
    if program in ("python", "python3"):
        return _problems_of_python_command(rest)
    if program == "sh":
        return [f"no file {word}" for word in rest if not (ROOT / word).exists()]
    return [] if program in OTHERS else [f"{line}: what is {program}?"]


def _problems_of_python_command(words: list[str]) -> list[str]:
    if words[:1] == ["-m"]:
        module = re.sub(r"\.?[A-Z]+$", "", words[1])  # capitals stand for one of several
        if module and not importlib.util.find_spec(module):
            return [f"no module {module}"]
        return [f"no file {word}" for word in words[2:] if module == "pytest" and "/" in word and not (ROOT / word).exists()]
    return [f"no file {word}" for word in words[:1] if not (ROOT / word).exists() and word not in _saved()]


@cache
def _saved() -> set[str]:
    """Files that readers make of a snippet, whose first line names it."""
    return {name for snippet in snippets() for name in re.findall(r"\A# (\w+\.py)$", snippet.text, re.MULTILINE)}


@cache
def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def problems_of_prose(page: str) -> list[str]:
    """Commands and options in the text that do not exist. Words in capitals, `[…]` and `…` stand for something."""
    found: list[str] = []
    text = prose(page)
    for line in INLINE.findall(text.replace("\n", " ")):
        words = [word for word in re.split(r"[\s\[\]]+", line) if word]
        if words[0] != "pixiu":
            with contextlib.suppress(ValueError):
                found += problems_of_line(line)
            continue
        command, rest = _command(words[1:])
        if command is _commands() and rest[0] not in ("--help", "--version"):
            found.append(f"`{line}`: no such command")
            continue
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
        found += [f"`{line}`: no option {option}" for option in LONG_OPTION.findall(line) if option not in known]
    for expression in CALL.findall(text):
        with contextlib.suppress(SyntaxError):  # not Python: `px.user(7).chat_…`
            found += [f"`{expression}`: {each}" for each in _problems_of_expression(expression)]
    for role, key in OPTION.findall(text):
        options = importlib.import_module(f"{role}.options").Options
        if key not in options.__dataclass_fields__ and not list((ROOT / role).glob(f"{key}*")):  # or a module is meant
            found.append(f"`{role}.{key}`: no such option")
    return found


def _problems_of_expression(text: str) -> list[str]:
    """As `problems_of_python`; `…` stands for any arguments."""
    reader = _Reader()
    reader.visit(ast.parse(text.replace("…", "..."), mode="eval"))
    return reader.found


class Instance(NamedTuple):
    """Of this class, or awaited to it."""

    cls: type


class Several(NamedTuple):
    """A list, or another iterable, of instances of this class."""

    cls: type


def problems_of_python(text: str) -> list[str]:
    """What is wrong with a Python snippet: syntax, imports, names of modules and objects of ours, arguments."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        compile(text, "snippet", "exec", flags)
        tree = compile(text, "snippet", "exec", flags | ast.PyCF_ONLY_AST)
    except SyntaxError as error:
        return [str(error)]
    reader = _Reader()
    reader.visit(tree)
    return reader.found


class _Reader(ast.NodeVisitor):
    """Follows what names stand for, as far as signatures and annotations say it. `None`: not known, nothing is said of it."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._names: dict[str, Any] = {"pixiu": pixiu, "px": Instance(pixiu.Client)}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            try:
                module = importlib.import_module(alias.name)
            except ImportError as error:
                self.found.append(str(error))
                continue
            self._names[alias.asname or alias.name] = module

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        try:
            module = importlib.import_module(node.module or "")
        except ImportError as error:
            self.found.append(str(error))
            return
        for alias in node.names:
            if hasattr(module, alias.name):
                self._names[alias.asname or alias.name] = getattr(module, alias.name)
            else:
                self.found.append(f"{node.module} has no {alias.name}")

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        enter = "__enter__" if isinstance(node, ast.With) else "__aenter__"
        for item in node.items:
            self._bind(item.optional_vars, self._result(self._value(item.context_expr), enter))
        self._body(node.body)

    visit_AsyncWith = visit_With

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        step = "__next__" if isinstance(node, ast.For) else "__anext__"
        value = self._value(node.iter)
        self._bind(node.target, Instance(value.cls) if isinstance(value, Several) else self._result(value, step))
        self._body([*node.body, *node.orelse])

    visit_AsyncFor = visit_For

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self._value(node.value)
        for target in node.targets:
            self._bind(target, value)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        known = dict(self._names)
        for argument in node.args.args:
            self._bind(ast.Name(argument.arg), self._annotated(argument.annotation))
        self._body(node.body)
        self._names = known | {node.name: None}

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._value(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._value(node)

    def _body(self, nodes: list[ast.stmt]) -> None:
        for node in nodes:
            self.visit(node)

    def _bind(self, target: ast.expr | None, value: Any) -> None:
        if isinstance(target, ast.Name):
            self._names[target.id] = value

    def _annotated(self, annotation: ast.expr | None) -> Any:
        found = self._value(annotation) if annotation is not None else None
        return Instance(found) if isinstance(found, type) else None

    def _value(self, node: ast.expr) -> Any:
        """What an expression is: an object of ours, an `Instance`, or None."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Await):
            value = self._value(node.value)
            return value if isinstance(node.value, ast.Call) and _is_coroutine(self._value(node.value.func)) else None
        if isinstance(node, ast.Attribute):
            return self._attribute(self._value(node.value), node.attr)
        if isinstance(node, ast.Call):
            return self._called(node)
        if isinstance(node, ast.Subscript):
            value = self._value(node.value)
            return Instance(value.cls) if isinstance(value, Several) and not isinstance(node.slice, ast.Slice) else None
        self.generic_visit(node)
        return None

    def _attribute(self, owner: Any, name: str) -> Any:
        if owner is None or isinstance(owner, Several):
            return None
        if not isinstance(owner, Instance):
            if not hasattr(owner, name):
                self.found.append(f"{getattr(owner, '__name__', owner)} has no {name}")
            return getattr(owner, name, None)
        found = inspect.getattr_static(owner.cls, name, None)
        if isinstance(found, property):
            return _instance(_hints(found.fget).get("return"), owner.cls)
        if inspect.isfunction(found):
            return types.MethodType(found, owner)
        if found is None and name not in _own_names(owner.cls):
            self.found.append(f"{owner.cls.__name__} has no {name}")
        return _instance(_hints(owner.cls).get(name), owner.cls)

    def _called(self, node: ast.Call) -> Any:
        function = self._value(node.func)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self._value(argument)
        if not (inspect.isroutine(function) or isinstance(function, type)) or isinstance(function, types.BuiltinFunctionType):
            return None
        if not function.__module__.startswith(("pixiu", "pipeline")):
            return None
        self._check_arguments(function, node)
        if isinstance(function, type):
            return Instance(function)
        bound_to = getattr(function, "__self__", None)
        return _instance(_hints(function).get("return"), bound_to.cls if isinstance(bound_to, Instance) else None)

    def _check_arguments(self, function: Any, node: ast.Call) -> None:
        vague = any(isinstance(each, ast.Starred) or (isinstance(each, ast.Constant) and each.value is ...) for each in node.args)
        if vague or any(keyword.arg is None for keyword in node.keywords):
            return
        given = {str(keyword.arg): None for keyword in node.keywords}
        signature = inspect.signature(function)
        try:
            bound = signature.bind(*node.args, **given)
        except TypeError as error:
            self.found.append(f"{function.__name__}: {error}")
            return
        for name, parameter in signature.parameters.items():
            options = _hints(function).get(name)
            if parameter.kind is parameter.VAR_KEYWORD and typing.get_origin(options) is typing.Unpack:
                wrong = set(bound.arguments.get(name, {})) - set(typing.get_args(options)[0].__annotations__)
                self.found += [f"{function.__name__}: no argument {each}" for each in sorted(wrong)]

    def _result(self, owner: Any, name: str) -> Any:
        if not isinstance(owner, Instance):
            return None
        method = self._attribute(owner, name)
        return _instance(_hints(method).get("return"), owner.cls) if method is not None else None


def _is_coroutine(function: Any) -> bool:
    return inspect.iscoroutinefunction(getattr(function, "__func__", function))


def _own_names(cls: type) -> Iterator[str]:
    """What the methods of a class, or its annotations, give its instances."""
    for base in cls.__mro__:
        yield from getattr(base, "__annotations__", {})
        with contextlib.suppress(OSError, TypeError):
            yield from re.findall(r"self\.(\w+)", inspect.getsource(base))


def _hints(thing: Any) -> dict[str, Any]:
    """The annotations of a function or class; none where they name what is imported for type checkers alone."""
    try:
        return typing.get_type_hints(getattr(thing, "__func__", thing))
    except (NameError, TypeError):
        return {}


def _instance(annotation: Any, owner: type | None) -> Instance | Several | None:
    if annotation is typing.Self:
        return Instance(owner) if owner is not None else None
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(origin, type) and issubclass(origin, Iterable | AsyncIterable) and len(set(inner) - {...}) == 1:
        return Several(inner[0]) if _is_ours(inner[0]) else None
    return Instance(annotation) if _is_ours(annotation) else None


def _is_ours(annotation: Any) -> bool:
    return isinstance(annotation, type) and annotation.__module__.startswith("pixiu")

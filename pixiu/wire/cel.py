"""The syntax of expressions: text into a tree. A subset of CEL, without macros but `has`. Pure.

    headers["region"] == "eu" && (size > 1000 || tag in ["a", "b"])

    ? :    ||    &&    == != < <= > >= in    + -    * / %    ! -    . [ ] ( )        from loose to tight

Source: docs/topics.md, "Expressions"; the Common Expression Language, https://github.com/google/cel-spec.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple, NoReturn

from pixiu.errors import InvalidArgument

MAX_EXPRESSION_BYTES: Final = 4096
MAX_NODES: Final = 256
"""Names, literals and operators of an expression, each of which is looked at once at most."""
MAX_DEPTH: Final = 32
"""Operators and parentheses within each other."""
RELATIONS: Final = ("==", "!=", "<=", ">=", "<", ">", "in")
_RESERVED: Final = frozenset(
    [
        "as",
        "break",
        "const",
        "continue",
        "else",
        "for",
        "function",
        "if",
        "import",
        "let",
        "loop",
        "package",
        "namespace",
        "return",
        "var",
        "void",
        "while",
        "null",
    ]
)
_TOKEN: Final = re.compile(
    r"""(?P<space>[ \t\r\n]+|//[^\n]*)
    |(?P<double>[0-9]+\.[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)
    |(?P<int>0[xX][0-9a-fA-F]+|[0-9]+)
    |(?P<string>[rR]?(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'))
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<sign>\|\||&&|==|!=|<=|>=|[-+*/%<>!?:.,()\[\]])""",
    re.VERBOSE,
)
_ESCAPE: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xX]([0-9a-fA-F]{2})|([0-3][0-7]{2})|(.))", re.DOTALL)
_PLAIN: Final = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"} | {each: each for each in "\\'\"`?"}


class Token(NamedTuple):
    """A word of an expression."""

    kind: str
    """One of "double", "int", "string", "name", "sign" and "end"."""
    text: str
    at: int


class Node(NamedTuple):
    """A piece of an expression. `kind` is an operator ("negative" for the one before a number), or one of "const", "name", "list",
    "index" (also what follows a dot) and "call".

    `name` is that of a variable, a function or a method; a method's first part is what it is called on."""

    kind: str
    at: int
    parts: tuple[Node, ...] = ()
    name: str = ""
    value: bool | int | float | str = False
    depth: int = 1


def problem(text: str, at: int, what: str) -> InvalidArgument:
    """An error that points to a column of the text."""
    line = text.count("\n", 0, at)
    column = at - (text.rfind("\n", 0, at) + 1) + 1
    where = f"line {line + 1}, column {column}" if "\n" in text else f"column {column}"
    near = text[at : at + 20].partition("\n")[0]
    return InvalidArgument(f"the expression, {where}: {what}" + (f", at {near!r}" if near else ""))


def parse(text: str) -> Node:
    """Parse an expression. Raises InvalidArgument, which says the column."""
    return _Parser(text).whole()


def words(text: str) -> list[str]:
    """An expression without its spaces: two that have the same are the same. Raises InvalidArgument."""
    return [token.text for token in _tokens(text)]


def _tokens(text: str) -> list[Token]:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as half:
        raise problem(text, half.start, "half a character") from half
    if size > MAX_EXPRESSION_BYTES:
        raise InvalidArgument(f"an expression has at most {MAX_EXPRESSION_BYTES} bytes, this one {size}")
    found, at = list[Token](), 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            what = "a text that is not closed" if text[at] in "\"'" else "a character that no expression has"
            raise problem(text, at, what)
        kind = str(match.lastgroup)
        if kind != "space":
            found.append(Token(kind, match.group(), at))
        at = match.end()
    return [*found, Token("end", "", at)]


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._tokens, self._next, self._nested, self._nodes = text, _tokens(text), 0, 0, 0

    def _fail(self, at: int, what: str) -> NoReturn:
        raise problem(self._text, at, what)

    def whole(self) -> Node:
        found = self._expression()
        if self._token.kind != "end":
            self._fail(self._token.at, "an operator is missing, or a parenthesis is too many")
        return found

    @property
    def _token(self) -> Token:
        return self._tokens[self._next]

    def _take(self, *texts: str) -> Token | None:
        token = self._token
        if token.kind in ("sign", "name") and token.text in texts:
            self._next += 1
            return token
        return None

    def _need(self, text: str) -> None:
        if self._take(text) is None:
            self._fail(self._token.at, f"a {text} is missing")

    def _node(self, kind: str, at: int, *parts: Node, name: str = "", value: bool | int | float | str = False) -> Node:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            self._fail(at, f"more than {MAX_NODES} names, literals and operators")
        depth = 1 + max((part.depth for part in parts), default=0)
        if depth > MAX_DEPTH:
            self._fail(at, f"more than {MAX_DEPTH} operators within each other")
        return Node(kind, at, parts, name, value, depth)

    def _expression(self) -> Node:
        self._nested += 1
        if self._nested > MAX_DEPTH:
            self._fail(self._token.at, f"more than {MAX_DEPTH} parentheses within each other")
        found = self._joined("||")
        mark = self._take("?")
        if mark is not None:
            yes = self._joined("||")
            self._need(":")
            found = self._node("?", mark.at, found, yes, self._expression())
        self._nested -= 1
        return found

    def _joined(self, sign: str) -> Node:
        """Parse operands of || or &&, into one node."""
        parts, at = [self._joined("&&") if sign == "||" else self._relation()], -1
        while (token := self._take(sign)) is not None:
            at = token.at if at < 0 else at
            parts.append(self._joined("&&") if sign == "||" else self._relation())
        return parts[0] if len(parts) == 1 else self._node(sign, at, *parts)

    def _relation(self) -> Node:
        found = self._sum()
        while (token := self._take(*RELATIONS)) is not None:
            found = self._node(token.text, token.at, found, self._sum())
        return found

    def _sum(self) -> Node:
        found = self._product()
        while (token := self._take("+", "-")) is not None:
            found = self._node(token.text, token.at, found, self._product())
        return found

    def _product(self) -> Node:
        found = self._unary()
        while (token := self._take("*", "/", "%")) is not None:
            found = self._node(token.text, token.at, found, self._unary())
        return found

    def _unary(self) -> Node:
        token = self._take("!", "-")
        if token is None:
            return self._member()
        if token.text == "-" and self._token.kind in ("int", "double"):
            return self._number(negative=True)
        self._nested += 1
        if self._nested > MAX_DEPTH:
            self._fail(token.at, f"more than {MAX_DEPTH} operators within each other")
        found = self._node("!" if token.text == "!" else "negative", token.at, self._unary())
        self._nested -= 1
        return found

    def _member(self) -> Node:
        found = self._primary()
        while (token := self._take(".", "[")) is not None:
            if token.text == "[":
                found = self._node("index", token.at, found, self._expression())
                self._need("]")
                continue
            name = self._token
            if name.kind != "name":
                self._fail(name.at, "a name is missing after the dot")
            self._next += 1
            if self._take("("):
                found = self._node("call", name.at, found, *self._list(")"), name="." + name.text)
            else:
                literal = self._node("const", name.at, value=name.text)
                found = self._node("index", token.at, found, literal)
        return found

    def _list(self, close: str) -> list[Node]:
        found = list[Node]()
        while self._take(close) is None:
            if found:
                self._need(",")
                if close == "]" and self._take("]"):
                    break
            found.append(self._expression())
        return found

    def _primary(self) -> Node:
        token = self._token
        if self._take("("):
            found = self._expression()
            self._need(")")
            return found
        if self._take("["):
            return self._node("list", token.at, *self._list("]"))
        if token.kind in ("int", "double"):
            return self._number(negative=False)
        self._next += 1
        if token.kind == "string":
            return self._node("const", token.at, value=self._unescaped(token))
        if token.kind != "name" or token.text in _RESERVED or token.text == "in":
            self._fail(token.at, "a value is missing here" if token.kind != "name" else f"{token.text} is no value")
        if token.text in ("true", "false"):
            return self._node("const", token.at, value=token.text == "true")
        if self._take("("):
            return self._node("call", token.at, *self._list(")"), name=token.text)
        return self._node("name", token.at, name=token.text)

    def _number(self, *, negative: bool) -> Node:
        token = self._token
        self._next += 1
        value: int | float
        if token.kind == "double":
            value = float(token.text)
        else:
            value = int(token.text, 16 if token.text[:2] in ("0x", "0X") else 10) if len(token.text) <= 20 else 1 << 64
        value = -value if negative else value
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            self._fail(token.at, "a whole number has 64 bits with its sign")
        return self._node("const", token.at, value=value)

    def _unescaped(self, token: Token) -> str:
        raw = token.text[0] in "rR"
        inner = token.text[2:-1] if raw else token.text[1:-1]
        if raw or "\\" not in inner:
            return inner

        def one(match: re.Match[str]) -> str:
            short, long, byte, octal, plain = match.groups()
            code = int(octal, 8) if octal else int(short or long or byte or "-1", 16)
            if plain in _PLAIN:
                return _PLAIN[plain]
            if not 0 <= code < 0x110000 or 0xD800 <= code < 0xE000:
                self._fail(token.at + 1 + match.start(), f"{match.group()} is no character")
            return chr(code)

        return _ESCAPE.sub(one, inner)

"""The expressions of rules, made into functions once; each message is then only handed to them.

An expression gives a value; None is null and unknown alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple
from uuid import UUID

from lark import Token, Tree

from twinbus.namespace.engine.rules import values
from twinbus.namespace.engine.rules.errors import RuleEvaluationError, RuleSyntaxError
from twinbus.namespace.engine.rules.grammar import Node
from twinbus.namespace.engine.rules.view import SYSTEM, MessageView

Run = Callable[[MessageView], Any]

# Python's own stack is what a deeper one would use up.
_DEEPEST: Final = 150


class Term(NamedTuple):
    """A compiled part: what it gives for a message; `value` is that where it is the same for all.

    `key` is the name, in lower case, of the user's property that it is. `hinges` are a property and a text: wherever
    that property is another text, the condition is false.
    """

    run: Run
    is_constant: bool = False
    value: Any = None
    key: str | None = None
    hinges: tuple[str, str] | None = None


class PropertyName(NamedTuple):
    """Which property a text names; `key` is its name in lower case."""

    is_system: bool
    name: str
    key: str
    position: int


_CALCULATIONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "+": values.add,
    "-": values.subtract,
    "*": values.multiply,
    "/": values.divide,
    "%": values.remainder,
}


class ExpressionCompiler:
    """One text on its way to a function; what a node is compiled by bears its name."""

    def __init__(self, text: str, parameters: Mapping[str, Any]) -> None:
        self._text = text
        self._parameters = {name.lower().removeprefix("@"): value for name, value in parameters.items()}

    def fault(self, fault: str, position: int) -> RuleSyntaxError:
        return RuleSyntaxError(fault, position + 1, self._text)

    def term(self, node: Node, depth: int) -> Term:
        if depth > _DEEPEST:
            raise self.fault(f"the expression is nested more than {_DEEPEST} deep.", start_of(node))
        build: Callable[[Node, int], Term] = getattr(self, "_" + node.data)
        return build(node, depth + 1)

    def property_name(self, node: Node) -> PropertyName:
        *scope, last = (token for token in node.children if isinstance(token, Token))
        name, position = _name(last), _position(last)
        if not name:
            raise self.fault("the name of a property cannot be empty.", position)
        if not scope:
            return PropertyName(False, name, name.lower(), position)
        owner = _name(scope[0]).lower()
        if owner not in ("sys", "user"):
            raise self.fault(
                f"'{owner}' is no scope: it is sys or user. Write [{owner}.{name}] for a name with a dot.",
                _position(scope[0]),
            )
        if owner == "sys" and name.lower() not in SYSTEM:
            raise self.fault(f"there is no system property '{name}'.", position)
        return PropertyName(owner == "sys", name, name.lower(), position)

    # --- expressions -----------------------------------------------------------------------------------------------

    def _property(self, node: Node, depth: int) -> Term:
        name = self.property_name(node)
        if name.is_system:
            return Term(SYSTEM[name.key])
        key = name.key

        def read(view: MessageView) -> Any:
            user = view.user
            if user is None:
                user = view.read_user()
            return user.get(key)

        return Term(read, key=key)

    def _constant(self, node: Node, depth: int) -> Term:
        token = node.children[0]
        assert isinstance(token, Token), "a constant is one token"
        match token.type:
            case "INTEGER":
                if len(token) > 19 or int(token) > values.LARGEST_LONG:
                    raise self.fault(f"{token[:30]} does not fit a 64-bit integer.", _position(token))
                return constant_term(int(token))
            case "REAL":
                return constant_term(float(token))
            case "STRING":
                return constant_term(token[1:-1].replace("''", "'"))
            case "NULL":
                return constant_term(None)
            case _:
                return constant_term(token.type == "TRUE")

    def _parameter(self, node: Node, depth: int) -> Term:
        token = node.children[0]
        assert isinstance(token, Token), "a parameter is one token"
        key = token[1:].lower()
        if key not in self._parameters:
            raise self.fault(f"the parameter {token} has no value.", _position(token))
        return constant_term(values.plain(self._parameters[key]))

    def _call(self, node: Node, depth: int) -> Term:
        function = node.children[0]
        assert isinstance(function, Token), "a call begins with its name"
        arguments = trees_of(node)
        match function.lower(), len(arguments):
            case ("newid", 0):
                return Term(lambda view: UUID(bytes=view.new_token(), version=4))
            case ("property" | "p", 1):
                run = self.term(arguments[0], depth).run
            case (("newid" | "property" | "p") as known, count):
                wanted = "no argument" if known == "newid" else "one argument, the name of a property"
                raise self.fault(f"{known}() takes {wanted}, not {count}.", _position(function))
            case _:
                raise self.fault(f"there is no function '{function}': newid, property and p are.", _position(function))

        def read(view: MessageView) -> Any:
            name = run(view)
            return None if name is None else view.named(values.need_text(name, "property()"))

        return Term(read)

    def _calculation(self, node: Node, depth: int) -> Term:
        left, right = (self.term(tree, depth) for tree in trees_of(node))
        sign = next(token for token in node.children if isinstance(token, Token))
        calculate = _CALCULATIONS[sign]
        return self._of_two(left, right, lambda a, b: None if a is None or b is None else calculate(a, b), node)

    def _signed(self, node: Node, depth: int) -> Term:
        operand = self.term(trees_of(node)[0], depth)
        apply = values.negate if node.children[0] == "-" else values.confirm
        run = operand.run
        term = Term(lambda view: None if (value := run(view)) is None else apply(value))
        return self._folded(term, node) if operand.is_constant else term

    # --- what they share -------------------------------------------------------------------------------------------

    def _runs(self, node: Node, depth: int) -> tuple[Run, ...]:
        return tuple(self.term(tree, depth).run for tree in trees_of(node))

    def _of_two(self, left: Term, right: Term, decide: Callable[[Any, Any], Any], node: Node) -> Term:
        first, second = left.run, right.run
        if right.is_constant:
            value = right.value
            term = Term(lambda view: decide(first(view), value))
            return self._folded(term, node) if left.is_constant else term
        return Term(lambda view: decide(first(view), second(view)))

    def _folded(self, term: Term, node: Node) -> Term:
        """The value of what depends on no message. What can never be evaluated is told now."""
        try:
            return constant_term(term.run(_NO_MESSAGE))
        except RuleEvaluationError as error:
            raise self.fault(f"{error}.", start_of(node)) from None


_NO_MESSAGE: Final = MessageView(b"", now=0, seq=0, ttl=None, new_token=bytes)


def constant_term(value: Any) -> Term:
    return Term(lambda view: value, True, value)


def trees_of(node: Node) -> list[Node]:
    """The parts that are not mere tokens; lark puts None where an optional one is left out."""
    return [child for child in node.children if isinstance(child, Tree)]


def _name(token: Token) -> str:
    if token.type == "QUOTED":
        return token[1:-1].replace('""', '"')
    return token[1:-1].replace("]]", "]") if token.type == "DELIMITED" else str(token)


def _position(token: Token) -> int:
    return token.start_pos or 0


def start_of(node: Node) -> int:
    return int(getattr(node.meta, "start_pos", 0))

"""The grammar of SQL filters and actions. Parsing returns a syntax tree, or raises an error with the position.

The grammar decides about syntax only. The compilers (`compiler`, `actions`) check names and types.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, Final

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedEOF, UnexpectedToken

from twinbus.namespace.engine.rules.errors import RuleSyntaxError

SyntaxTree = Tree[Token]

_GRAMMAR: Final = r"""
?filter: disjunction
?disjunction: conjunction (_OR conjunction)*
?conjunction: negation (_AND negation)*
?negation: NOT negation -> negated
    | condition
?condition: sum COMPARISON sum -> comparison
    | sum EQUALS sum -> comparison
    | property IS NULL -> is_null
    | property IS NOT NULL -> is_not_null
    | sum IN list -> is_in
    | sum NOT IN list -> is_not_in
    | sum LIKE sum [_ESCAPE sum] -> is_like
    | sum NOT LIKE sum [_ESCAPE sum] -> is_not_like
    | EXISTS "(" property ")" -> exists
    | "(" disjunction ")"
list: "(" sum ("," sum)* ")"

action: (statement ";"*)+
statement: _SET property EQUALS sum -> set
    | _REMOVE property -> remove

?sum: product
    | sum (PLUS | MINUS) product -> calculation
?product: sign
    | product (STAR | SLASH | PERCENT) sign -> calculation
?sign: atom
    | (PLUS | MINUS) sign -> signed
?atom: property
    | constant
    | PARAMETER -> parameter
    | NAME "(" [sum ("," sum)*] ")" -> call
    | "(" sum ")"
constant: INTEGER | REAL | STRING | TRUE | FALSE | NULL
property: _name
    | _name "." _name
_name: NAME | QUOTED | DELIMITED

_OR: "OR"i
_AND: "AND"i
NOT: "NOT"i
IS: "IS"i
IN: "IN"i
LIKE: "LIKE"i
_ESCAPE: "ESCAPE"i
EXISTS: "EXISTS"i
NULL: "NULL"i
TRUE: "TRUE"i
FALSE: "FALSE"i
_SET: "SET"i
_REMOVE: "REMOVE"i
EQUALS: "="
COMPARISON: "<>" | "!=" | "<=" | ">=" | "<" | ">"
PLUS: "+"
MINUS: "-"
STAR: "*"
SLASH: "/"
PERCENT: "%"
NAME: /[^\W\d_]\w*/i
QUOTED: /"(?:[^"]|"")*"/
DELIMITED: /\[(?:[^\]]|\]\])*\]/
PARAMETER: /@[^\W\d]\w*/
REAL.2: /\d+\.\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+/
INTEGER: /\d+/
STRING: /'(?:[^']|'')*'/
%import common.WS
%ignore WS
"""

_TERMINAL_TEXTS: Final = {
    "_OR": "OR",
    "_AND": "AND",
    "_ESCAPE": "ESCAPE",
    "_SET": "SET",
    "_REMOVE": "REMOVE",
    "NAME": "a property",
    "QUOTED": "a property",
    "DELIMITED": "a property",
    "PARAMETER": "a parameter",
    "REAL": "a number",
    "INTEGER": "a number",
    "STRING": "a string",
    "EQUALS": "a comparison",
    "COMPARISON": "a comparison",
    "PLUS": "an operator",
    "MINUS": "an operator",
    "STAR": "an operator",
    "SLASH": "an operator",
    "PERCENT": "an operator",
    "LPAR": "(",
    "RPAR": ")",
    "COMMA": ",",
    "DOT": ".",
    "SEMICOLON": ";",
    "$END": "the end",
}
_VALUE_STARTS: Final = frozenset(
    ("(", "TRUE", "FALSE", "NULL", "a number", "a parameter", "a string", "a property", "an operator")
)
_CONDITION_STARTS: Final = frozenset(("a value", "NOT", "EXISTS"))


@cache
def _parser() -> Lark:
    return Lark(_GRAMMAR, start=["filter", "action"], parser="lalr", lexer="basic", propagate_positions=True)


def parse(text: str, start: str) -> SyntaxTree:
    """Parse a text as a `filter` or an `action`. Raises RuleSyntaxError."""
    try:
        return _parser().parse(text, start=start)
    except UnexpectedCharacters as error:
        at: Any = error.pos_in_stream
        raise RuleSyntaxError(_unexpected_character(text[at]), at + 1, text) from None
    except (UnexpectedToken, UnexpectedEOF) as error:
        token: Any = getattr(error, "token", None)
        at_end = token is None or token.type == "$END"
        position = len(text) if at_end else token.start_pos
        found = "the end" if at_end else f"'{token}'"
        expected = _expected_text(getattr(error, "accepts", None) or error.expected)
        raise RuleSyntaxError(f"{expected} is expected, not {found}.", position + 1, text) from None


def _unexpected_character(character: str) -> str:
    if character == "'":
        return "the string that begins here does not end; a ' inside it is written ''."
    if character in '"[':
        return "the name that begins here does not end."
    if character == "_":
        return "a name begins with a letter; write [_name] for another."
    return f"{character!r} has no meaning here."


def _expected_text(terminals: Iterable[str]) -> str:
    found = {_TERMINAL_TEXTS.get(name, name) for name in terminals}
    if found >= _VALUE_STARTS:
        found = found - _VALUE_STARTS | {"a value"}
        if found >= _CONDITION_STARTS:
            found = found - _CONDITION_STARTS | {"a condition"}
    shown = sorted(found)
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"

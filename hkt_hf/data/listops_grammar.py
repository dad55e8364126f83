"""ListOps expressions: what they mean, and how they are drawn.

`evaluate` reads the notation of the Long Range Arena (Tay et al. 2021), `[MAX 3 [MIN 4 7 ] ]`, and the one of the
original files (Nangia & Bowman 2018), where the same tree is written as left-nested pairs in parentheses:
`( ( ( [MAX 3 ) ( ( ( [MIN 4 ) 7 ) ] ) ) ] )`. `generate_chunk` draws from the grammar of the Long Range Arena.
"""

import random
import re
from collections.abc import Callable

from ..tokenization_hkt import LISTOPS_TOKENS

# The order of digits and operators decides which bytes a seed gives. The tokenizer owns it, since its file travels with
# checkpoints and so cannot import from here.
DIGITS = LISTOPS_TOKENS[:10]
GENERATED_OPERATORS = LISTOPS_TOKENS[10:14]
END = LISTOPS_TOKENS[14]

# Long Range Arena constants.
OPERATOR_PROBABILITY = 0.25
MIN_ARGUMENTS = 2
MAX_ARGUMENTS = 10

# Part of what a seed means, like the orders above.
TREES_PER_CHUNK = 4096

_VALUES = {digit: value for value, digit in enumerate(DIGITS)}
_ARGUMENTS_PER_DRAW = (MAX_ARGUMENTS - MIN_ARGUMENTS + 1) / OPERATOR_PROBABILITY


def _median(values: list[int]) -> int:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


# FIRST and LAST occur in some variants of the original files, never in the Long Range Arena.
OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": _median,
    "[SM": lambda values: sum(values) % 10,
    "[FIRST": lambda values: values[0],
    "[LAST": lambda values: values[-1],
}


def evaluate(expression: str) -> int:
    """Value of a ListOps expression, 0 to 9.

    Tokens are separated by any whitespace. An expression is a digit, or an operator, one or more expressions, `]`.
    MED is the integer part of the median, SM the sum modulo 10.

    Either there are no parentheses at all, or they are exactly those of the original files: n + 1 opening ones in front
    of an operator with n arguments, a closing one after each argument and one after `]`; none around a digit. Any
    nesting depth works: the parser keeps its own stack.

    Raises:
        TypeError: `expression` is not a string.
        ValueError: anything malformed. The message gives the position of the offending token, counted in characters
            from 0, what was found there, the rule and the remedy.
    """
    if not isinstance(expression, str):
        raise TypeError(f"a ListOps expression is a string such as '[MAX 3 4 ]', got {type(expression).__name__}")

    frames: list[_Frame] = []
    result: int | None = None
    with_parentheses = False
    opened = 0  # opening parentheses read since the last other token
    closing: str | None = None  # the token that a closing parenthesis has to follow now

    for match in re.finditer(r"\S+", expression):
        token, position = match.group(), match.start()
        value: int | None = None

        if closing is not None:
            if token != ")":
                raise _malformed(position, token, f"')' follows {closing}, as in '( ( ( [MAX 3 ) 4 ) ] )'", "add ')'")
            ended_operator = closing == "']'"
            closing = None
            if not ended_operator:
                continue
            frame = frames.pop()
            value = OPERATORS[frame.operator](frame.values)
        elif result is not None:
            raise _malformed(position, token, "the expression is complete before this token", "remove what follows it")
        elif token in _VALUES or token in OPERATORS or token == "(":
            if frames and frames[-1].is_full():
                frame = frames[-1]
                rule = (
                    f"{frame.operator!r} at position {frame.position} has {frame.opened} '(' in front of it, "
                    f"which makes {frame.opened - 1} arguments"
                )
                raise _malformed(position, token, rule, "close it with ']' or add a '('")
            if token == "(":
                if not with_parentheses and frames:
                    rule = "an expression that begins without parentheses has none"
                    raise _malformed(position, token, rule, "remove all parentheses")
                with_parentheses = True
                opened += 1
                continue
            if token in OPERATORS:
                if with_parentheses and opened < 2:
                    rule = f"n + 1 '(' stand before an operator with n arguments, here are {opened}"
                    raise _malformed(position, token, rule, "write '( ( ( [MAX 3 ) 4 ) ] )', or no parentheses at all")
                frames.append(_Frame(token, position, opened))
                opened = 0
                continue
            if opened:
                rule = "a '(' is followed by another one or by an operator"
                raise _malformed(position, token, rule, "remove the '(' before the digit")
            value = _VALUES[token]
        elif token == END:
            if opened or not frames:
                rule = "']' closes an operator" + (" and cannot follow '('" if opened else ", and none is open")
                raise _malformed(position, token, rule, "remove it")
            frame = frames[-1]
            where = f"{frame.operator!r} at position {frame.position}"
            if not frame.values:
                raise _malformed(position, token, f"{where} needs at least one argument", "add a digit before ']'")
            if with_parentheses:
                if not frame.is_full():
                    rule = f"{where} has {frame.opened} '(' but {len(frame.values)} arguments, n arguments need n + 1"
                    raise _malformed(position, token, rule, "correct the number of '(' or of arguments")
                closing = "']'"
                continue
            frames.pop()
            value = OPERATORS[frame.operator](frame.values)
        elif token == ")":
            rule = "a ')' stands only after an argument or after ']', once for every '('"
            raise _malformed(position, token, rule, "remove it, or write no parentheses at all")
        else:
            raise _malformed(position, token, *_rule_for_unknown(token))

        if not frames:
            result = value
            continue
        frames[-1].values.append(value)
        if with_parentheses:
            closing = "an argument"

    end = len(expression)
    if frames:
        frame = frames[-1]
        missing = f"')' after {closing}" if closing is not None else "']'"
        rule = f"{frame.operator!r} at position {frame.position} is never closed"
        raise _malformed(end, None, rule, f"add the missing {missing}")
    if opened:
        raise _malformed(end, None, "an operator follows '('", "complete the expression")
    if result is None:
        raise _malformed(0, None, "an expression has at least one token", "pass a digit or an operator, '[MAX 3 4 ]'")
    return result


class _Frame:
    """An operator that is still open, with the values of its arguments so far."""

    __slots__ = ("opened", "operator", "position", "values")

    def __init__(self, operator: str, position: int, opened: int):
        self.operator = operator
        self.position = position
        self.opened = opened  # parentheses in front of the operator, 0 in the notation without
        self.values: list[int] = []

    def is_full(self) -> bool:
        return self.opened > 0 and len(self.values) == self.opened - 1


def _malformed(position: int, token: str | None, rule: str, remedy: str) -> ValueError:
    # A token can be as long as the text when the separating spaces are missing.
    shown = "the end of the text" if token is None else repr(token if len(token) <= 24 else token[:21] + "...")
    return ValueError(f"malformed ListOps expression at position {position}: found {shown}; {rule}: {remedy}")


def _rule_for_unknown(token: str) -> tuple[str, str]:
    if token.isascii() and token.isdigit():
        return "a number has one digit", "use 0 to 9"
    if token.upper() in OPERATORS:
        return "operators are in capitals", f"write {token.upper()}"
    known = f"the tokens are 0 to 9, {', '.join(OPERATORS)}, ], ( and ), with whitespace between any two"
    return known, "correct it or separate it"


def longest_expression(max_depth: int) -> int:
    """Length of the longest expression of the grammar: each operator has 10 arguments, digits only at `max_depth`."""
    length = 1
    # 20 levels are more than any memory holds; without a bound a large max_depth would cost minutes here.
    for _ in range(min(max_depth, 20) - 1):
        length = 2 + MAX_ARGUMENTS * length
    return length


def generate_chunk(
    chunk: int, *, min_length: int, max_length: int, max_depth: int, seed: int
) -> list[tuple[str, int, int, int]]:
    """Draw 4,096 trees from the Long Range Arena grammar and keep those of an accepted length.

    Chunks are independent of each other, so that any number of processes gives the same data.

    Returns:
        `(text, label, length, depth)` for each tree with `min_length <= length <= max_length`, in the order drawn,
        repetitions included. `length` is the number of tokens; `depth` is that of the deepest node, the root being 1.
    """
    # Only the sequence of random() is promised to stay the same across Python versions; choice() and randint() are not.
    draw = random.Random(f"{seed}:{chunk}").random
    expressions = []
    for _ in range(TREES_PER_CHUNK):
        arities = _draw_shape(draw, min_length, max_length, max_depth)
        if arities is not None:
            expressions.append(_write_and_evaluate(draw, arities))
    return expressions


def _draw_shape(draw: Callable[[], float], min_length: int, max_length: int, max_depth: int) -> list[int] | None:
    """Number of arguments of every node in the order written (0 for a digit), or None if the length is not accepted.

    Digits and operators are left open: they do not affect the length, so drawing them afterwards for accepted trees
    only gives the distribution of full rejection sampling.
    """
    if max_depth == 1:
        return [0] if min_length <= 1 <= max_length else None
    arities: list[int] = []
    unfinished: list[int] = []  # arguments still to draw, for each open operator but the innermost
    to_draw = 1  # the same for the innermost
    deepest_parent = max_depth - 2
    # Every argument that is still to be drawn counts as 1, the least it can have, so a tree is abandoned as soon as it
    # must become too long, and the length is exact once the tree is complete.
    length = 1
    while True:
        if to_draw == 0:
            if not unfinished:
                return arities if length >= min_length else None
            to_draw = unfinished.pop()
            continue
        to_draw -= 1
        number = draw()
        if number >= OPERATOR_PROBABILITY:
            arities.append(0)
            continue
        # Below the threshold the same number is uniform, and serves for the number of arguments.
        arity = MIN_ARGUMENTS + int(number * _ARGUMENTS_PER_DRAW)
        length += arity + 1
        if length > max_length:
            return None
        arities.append(arity)
        if len(unfinished) == deepest_parent:
            arities.extend([0] * arity)
        else:
            unfinished.append(to_draw)
            to_draw = arity


def _write_and_evaluate(draw: Callable[[], float], arities: list[int]) -> tuple[str, int, int, int]:
    """Fill a tree with operators and digits: `(text, label, length, depth)`."""
    tokens: list[str] = []
    open_operators: list[tuple[str, int, list[int]]] = []
    depth = 1
    value = 0
    for arity in arities:
        if arity:
            operator = GENERATED_OPERATORS[int(draw() * 4)]
            tokens.append(operator)
            open_operators.append((operator, arity, []))
            depth = max(depth, len(open_operators) + 1)
            continue
        value = int(draw() * 10)
        tokens.append(DIGITS[value])
        while open_operators:
            operator, expected, values = open_operators[-1]
            values.append(value)
            if len(values) < expected:
                break
            open_operators.pop()
            tokens.append(END)
            value = OPERATORS[operator](values)
    return " ".join(tokens), value, len(tokens), depth

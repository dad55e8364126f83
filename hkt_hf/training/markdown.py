"""How reports and cards write figures."""

from collections.abc import Iterable


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    header = list(header)
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *map(list, rows))]


def percent(value: float, *, sign: bool = False) -> str:
    return f"{100 * value:{'+' if sign else ''}.2f}"


def percent_interval(bounds: list[float] | None, *, sign: bool = False) -> str:
    return "" if bounds is None else f"{percent(bounds[0], sign=sign)} to {percent(bounds[1], sign=sign)}"

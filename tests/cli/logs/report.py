"""Count per role which columns of the logs `init` reads as their owner would, and print the others.

From the repository root: ``PYTHONPATH=tests python -m cli.logs.report [--held-out | --all] [NAME
...]``. A column is *right* if its role is one of the owner's. It is *asked* if it is left out, or
`init` asks for the label: the output says why and what to write. Every other column is *wrong*,
silently.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from cli.logs.corpus import LOGS
from cli.logs.made_up import Log

from stratarec.cli.init.features import Guess
from stratarec.cli.init.guess import Guesses, guess
from stratarec.cli.init.sample import read_sample
from stratarec.errors import DataError

OUTCOMES = ("right", "asked", "wrong")


class Verdict(NamedTuple):
    """What `init` makes of one column."""

    log: str
    column: str
    role: str
    """The owner's role, or roles."""
    read: str
    """The role that `init` guesses."""
    outcome: str
    reason: str


def judge(log: Log, folder: Path) -> Iterator[Verdict]:
    """Read a log as `init` does, and compare the role of each column with the owner's."""
    sample = read_sample((str(log.write(folder)),))
    asks = ""
    try:
        guesses = guess(sample)
    except DataError as error:
        asks = str(error)
        named = next(name for name, (role, _) in log.columns.items() if role == "label")
        try:
            guesses = guess(sample, log.label or named)
        except DataError as again:
            yield from (
                Verdict(log.name, name, role, "none", "asked", str(again))
                for name, (role, _) in log.columns.items()
            )
            return
    for (name, (role, _)), column in zip(log.columns.items(), guesses.columns, strict=True):
        read = role_of(column, guesses)
        equal = {read, *EQUAL.get(read, ()), *(("number",) if column.ordered else ())}
        outcome = "right" if equal & {*role.split("|")} else "wrong"
        if outcome == "wrong" and read in ("out", "leak"):
            outcome = "asked"
        if asks and role == "label":
            outcome = "asked"
        if outcome == "wrong" and any(
            advice in column.reason for advice in ("`user`", "If so,", "--label ", "one time column")
        ):
            outcome = "asked"
        yield Verdict(log.name, name, role, read, outcome, asks or column.reason)


EQUAL = {"date": {"out"}, "out": {"leak"}, "leak": {"out"}, "item": {"category"}}
"""Role that is read -> other roles that it fulfils. A column left out for another reason is left
out, too. Dates other than the time of the row are left out, unless features of them lower the loss
of a quick model.

Few whole numbers (`Guess.ordered`) are drafted as numbers for an ensemble and as categories for
other models.
"""


def role_of(column: Guess, guesses: Guesses) -> str:
    """Return the role of a guess in the words of the owner."""
    if column.role == "ignored":
        return "out" if column.leak is None else "leak"
    if column == guesses.item:
        return "item"
    return {"dense": "number", "sparse": "category"}.get(column.role, column.role)


def table(verdicts: Iterable[Verdict]) -> Iterator[str]:
    """Yield a line per role with its counts, and a line for all roles."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for verdict in verdicts:
        for key in (verdict.role.split("|")[0], "all"):
            counts[key][verdict.outcome] += 1
    yield f"{'role':10}" + "".join(f"{outcome:>8}" for outcome in OUTCOMES)
    for role in sorted(counts, key=lambda role: (role == "all", role)):
        shares = f"{counts[role]['right'] / sum(counts[role].values()):8.1%}"
        yield f"{role:10}" + "".join(f"{counts[role][outcome]:8}" for outcome in OUTCOMES) + shares


def main(arguments: list[str]) -> None:
    """Print every column that is not right, and the table."""
    names = [each for each in arguments if not each.startswith("--")]
    logs = [log for log in LOGS if "--all" in arguments or log.held_out == ("--held-out" in arguments)]
    verdicts = []
    for log in [log for log in LOGS if log.name in names] or logs:
        with tempfile.TemporaryDirectory() as folder:
            verdicts += judge(log, Path(folder))
    for each in verdicts:
        if each.outcome != "right" or names:
            print(
                f"{each.outcome:5} {each.log}: {each.column} is {each.role}, read as "
                f"{each.read}: {each.reason[:150]}"
            )
    print(*table(verdicts), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])

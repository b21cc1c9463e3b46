"""Writes arithmetic word problems in the form of GSM8K, so that the examples need nothing from elsewhere.

    python examples/gsm8k/make_problems.py                       # into runs/gsm8k/data
    python examples/gsm8k/make_problems.py --folder data --train 2000

Three files: `train.jsonl` and `test.jsonl` with `question` and `answer` (the steps, then `#### number`), and
`solutions.jsonl` with right and wrong solutions, of which `plait dpo` makes pairs. GSM8K's own `train.jsonl` and
`test.jsonl` can take their place. The problems are a function of the seed.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

NAMES = (
    "Ada", "Ben", "Chen", "Dora", "Emil", "Farid", "Grace", "Hana", "Ivan", "Julia", "Kofi", "Lena", "Mina", "Noor",
    "Oskar", "Priya", "Quinn", "Rosa", "Sam", "Tara", "Umar", "Vera", "Wei", "Yara",
)  # fmt: skip
THINGS = (
    "apples", "books", "candles", "eggs", "flowers", "marbles", "muffins", "oranges", "pencils", "postcards", "ribbons",
    "shells", "stamps", "stickers", "tickets", "toys",
)  # fmt: skip
PLACES = ("at the market", "at school", "in the garden", "in the shop", "at home", "at the library")


class Problem(NamedTuple):
    """A question, and its solution step by step."""

    question: str
    steps: list[tuple[str, str, int]]
    """Of each: a sentence with `{}` where the calculation stands, the calculation, and its result."""

    def solution(self, wrong_from: int | None = None, by: int = 0) -> str:
        """The steps and the result; from a step on, with a mistake of `by`."""
        lines, last = [], 0
        for index, (sentence, calculation, result) in enumerate(self.steps):
            last = result + (by if wrong_from is not None and index >= wrong_from else 0)
            lines.append(sentence.format(f"{calculation} = <<{calculation.replace(' ', '')}={last}>>{last}"))
        return "\n".join([*lines, f"#### {last}"])


def bought_and_given(draw: random.Random) -> Problem:
    """Some more, and some fewer."""
    name, other, thing = *draw.sample(NAMES, 2), draw.choice(THINGS)
    had, more, given = draw.randint(5, 60), draw.randint(3, 40), draw.randint(2, 8)
    question = (
        f"{name} has {had} {thing}. {name} buys {more} more and gives {given} of them to {other}. "
        f"How many {thing} does {name} have now?"
    )
    first = (f"After buying, {name} has {{}} {thing}.", f"{had} + {more}", had + more)
    return Problem(question, [first, (f"{name} keeps {{}} of them.", f"{had + more} - {given}", had + more - given)])


def boxes(draw: random.Random) -> Problem:
    """A product, and something on top."""
    name, thing, place = draw.choice(NAMES), draw.choice(THINGS), draw.choice(PLACES)
    count, each, loose = draw.randint(2, 12), draw.randint(3, 15), draw.randint(1, 20)
    question = (
        f"{name} finds {count} boxes {place}, each with {each} {thing}. There are {loose} {thing} outside the boxes. "
        f"How many {thing} are there in all?"
    )
    first = (f"In the boxes are {{}} {thing}.", f"{count} * {each}", count * each)
    return Problem(question, [first, ("In all there are {}.", f"{count * each} + {loose}", count * each + loose)])


def earnings(draw: random.Random) -> Problem:
    """Something is sold, and something paid."""
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    count, price, days = draw.randint(3, 20), draw.randint(2, 9), draw.randint(2, 7)
    cost = draw.randint(1, count * price * days)
    question = (
        f"Every day {name} sells {count} {thing} for ${price} each. After {days} days {name} pays ${cost} for a stall. "
        f"How many dollars are left?"
    )
    daily, earned = count * price, count * price * days
    return Problem(
        question,
        [
            (f"{name} earns ${{}} a day.", f"{count} * {price}", daily),
            (f"In {days} days that is ${{}}.", f"{daily} * {days}", earned),
            ("What is left is ${}.", f"{earned} - {cost}", earned - cost),
        ],
    )


def shared_evenly(draw: random.Random) -> Problem:
    """A sum that is divided."""
    one, other, thing = *draw.sample(NAMES, 2), draw.choice(THINGS)
    children, each = draw.randint(2, 9), draw.randint(2, 12)
    mine = draw.randint(1, children * each - 1)
    yours = children * each - mine
    question = (
        f"{one} brings {mine} {thing} and {other} brings {yours}. They share all of them evenly among {children} "
        f"children. How many {thing} does each child get?"
    )
    first = (f"Together they have {{}} {thing}.", f"{mine} + {yours}", mine + yours)
    return Problem(question, [first, ("Each child gets {}.", f"{mine + yours} / {children}", each)])


KINDS: tuple[Callable[[random.Random], Problem], ...] = (bought_and_given, boxes, earnings, shared_evenly)


def problems(draw: random.Random, seen: set[str]) -> Iterator[Problem]:
    """Problems without end, none of them twice."""
    while True:
        found = draw.choice(KINDS)(draw)
        if found.question not in seen:
            seen.add(found.question)
            yield found


def graded(problem: Problem, draw: random.Random) -> dict[str, object]:
    """A question with a right and a wrong solution."""
    wrong = problem.solution(draw.randrange(len(problem.steps)), draw.choice([-10, -2, -1, 1, 2, 10]))
    return {
        "question": problem.question,
        "careful": {"solution": problem.solution(), "is_correct": True},
        "hasty": {"solution": wrong, "is_correct": False},
    }


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/gsm8k/data"))
    parser.add_argument("--train", type=int, default=7000, help="problems to train on")
    parser.add_argument("--test", type=int, default=500, help="problems to test on; as many graded ones")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    source = problems(draw, set())

    def answered() -> dict[str, object]:
        problem = next(source)
        return {"question": problem.question, "answer": problem.solution()}

    files = {
        "train": [answered() for _ in range(asked.train)],
        "test": [answered() for _ in range(asked.test)],
        "solutions": [graded(next(source), draw) for _ in range(asked.test)],
    }
    asked.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        path = asked.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} problems")


if __name__ == "__main__":
    main()

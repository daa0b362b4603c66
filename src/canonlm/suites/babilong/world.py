"""A simulator of stories: people move, take, drop and give things; or places lie north, south, east, west of others.

Stories and questions have the form of bAbI's first five tasks (arXiv 1502.05698); the world and the words are ours.

    qa1  Where is X?                                             one fact is needed
    qa2  Where is the O?                                         two
    qa3  Where was the O before the P?                           three
    qa4  What is north of the P?  What is the P north of?        one, which may have to be turned around
    qa5  Who gave the O to X?  What did X give to Y?  …          one

A question is asked only where the story has exactly one answer to it and every needed fact is indispensable: without
any one of them the answer is another, or there is none.
"""

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

PEOPLE = ("Irene", "Marco", "Nadia", "Oscar")
PLACES = ("bakery", "cinema", "hospital", "library", "museum", "station")
OBJECTS = ("parcel", "umbrella", "violin")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}

LABELS = dict.fromkeys(("qa1", "qa2", "qa3", "qa4"), PLACES) | {"qa5": (*PEOPLE, *OBJECTS)}
"""The possible answers to a task's questions."""

NEEDED = {"qa1": 1, "qa2": 2, "qa3": 3, "qa4": 1, "qa5": 1}
"""The number of facts that an answer needs."""

TASKS = tuple(LABELS)

SENTENCES = {
    "move": ("{who} went to the {what}.", "{who} walked to the {what}.", "{who} moved to the {what}."),
    "take": ("{who} took the {what}.", "{who} picked up the {what}."),
    "drop": ("{who} put down the {what}.", "{who} dropped the {what}."),
    "give": ("{who} gave the {what} to {to}.", "{who} handed the {what} to {to}."),
    **{side: (f"The {{who}} is {side} of the {{what}}.",) for side in OPPOSITE},
}


class Fact(NamedTuple):
    """A person moves to a place, takes or drops an object, gives it to somebody; or a place is north of another."""

    verb: str  # a key of SENTENCES
    who: str
    what: str
    to: str = ""


class StorySettings(NamedTuple):
    facts: tuple[int, int]  # min and max number of facts: uniform
    weights: Mapping[str, int]  # of the verbs that are possible


_CARRYING = {"move": 4, "take": 2, "drop": 1}
STORIES = {
    "qa1": StorySettings((2, 10), {"move": 1}),
    "qa2": StorySettings((4, 24), _CARRYING),
    "qa3": StorySettings((8, 32), _CARRYING),
    "qa5": StorySettings((4, 24), {"move": 3, "take": 2, "drop": 1, "give": 3}),
}


class Answer(NamedTuple):
    """An answer, and the numbers of the facts that it follows from, in order."""

    answer: str
    support: tuple[int, ...]


@dataclass(frozen=True)
class Story:
    """Sentences, a question and its answer. `support`: the indices of needed sentences, in order; empty: unknown."""

    facts: tuple[str, ...]
    question: str
    answer: str
    support: tuple[int, ...] = ()


def story(split: str, seed: int, task: str, index: int) -> Story:
    """Story `index` of a task: a function of these four."""
    rng = random.Random(f"babilong {split} {seed} {task} {index}")
    count = 0 if task == "qa4" else rng.randint(*STORIES[task].facts)
    while True:
        facts = _relations(rng) if task == "qa4" else _events(rng, count, STORIES[task].weights)
        answers = questions(task, facts)
        for question in rng.sample(list(answers), len(answers)):
            if _indispensable(task, facts, question, answers[question]):
                sentences = tuple(rng.choice(SENTENCES[fact.verb]).format(**fact._asdict()) for fact in facts)
                return Story(sentences, question, *answers[question])


def questions(task: str, facts: Sequence[Fact]) -> dict[str, Answer]:
    """Every question of the task to which these facts have exactly one answer. The facts may have gaps: a person who
    takes a thing was at its place, and a person who puts it down had it."""
    return dict(_QUESTIONS[task](facts))


def _indispensable(task: str, facts: Sequence[Fact], question: str, answer: Answer) -> bool:
    for number in answer.support:
        remaining = questions(task, [*facts[:number], *facts[number + 1 :]])
        if question in remaining and remaining[question].answer == answer.answer:
            return False
    return True


# -- people, places, objects ------------------------------------------------------------------------------------------


class World:
    """Where everybody and everything is, as far as it follows from the facts; with the numbers of these facts."""

    def __init__(self, facts: Sequence[Fact] = ()) -> None:
        self.at: dict[str, Answer] = {}  # person → place; (move,)
        self.held: dict[str, Answer] = {}  # object → person; (how it came to him or her,)
        self.left: dict[str, Answer] = {}  # object → place where it was put down; (move, drop)
        # object → its places in turn, each with the facts (take, move before, move) that brought it there
        self.past: dict[str, list[Answer]] = {}
        for number, fact in enumerate(facts):
            self.add(number, fact)

    def add(self, number: int, fact: Fact) -> None:
        who, thing = fact.who, fact.what
        before = self.at.get(who)
        if fact.verb == "move":
            self.at[who] = Answer(fact.what, (number,))
            carried = [(thing, how) for thing, (person, how) in self.held.items() if person == who]
            for thing, how in carried:
                self._reach(thing, fact.what, (*how, *(before.support if before else ()), number))
        elif fact.verb == "drop":
            self.held.pop(thing, None)
            self.left.pop(thing, None)
            if before:
                self.left[thing] = Answer(before.answer, (*before.support, number))
                self._reach(thing, before.answer, ())
        else:
            self.left.pop(thing, None)
            self.held[thing] = Answer(fact.to or who, (number,))
            if before:
                self._reach(thing, before.answer, ())

    def _reach(self, thing: str, place: str, support: tuple[int, ...]) -> None:
        past = self.past.setdefault(thing, [])
        if not past or past[-1].answer != place:
            past.append(Answer(place, tuple(sorted(support))))

    def possible(self, verb: str) -> list[tuple[str, ...]]:
        """The arguments (who, what, to) of every possible next fact with this verb. Nobody acts before his or her place
        is known, and a thing that nobody has touched yet can be anywhere."""
        at = {who: place for who, (place, _) in self.at.items()}
        held = {thing: who for thing, (who, _) in self.held.items()}
        left = {thing: place for thing, (place, _) in self.left.items()}
        if verb == "move":
            return [(who, place) for who in PEOPLE for place in PLACES if at.get(who) != place]
        if verb == "drop":
            return [(who, thing) for thing, who in held.items()]
        if verb == "give":
            return [(who, thing, to) for thing, who in held.items() for to in at if to != who and at[to] == at[who]]
        free = [thing for thing in OBJECTS if thing not in held]
        return [(who, thing) for who in at for thing in free if left.get(thing, at[who]) == at[who]]


def _events(rng: random.Random, count: int, weights: Mapping[str, int]) -> list[Fact]:
    world, facts = World(), list[Fact]()
    for number in range(count):
        possible = {verb: events for verb in weights if (events := world.possible(verb))}
        (verb,) = rng.choices(list(possible), [weights[verb] for verb in possible])
        facts.append(Fact(verb, *rng.choice(possible[verb])))
        world.add(number, facts[-1])
    return facts


def _where_things_are(facts: Sequence[Fact]) -> Iterator[tuple[str, Answer]]:
    world = World(facts)
    for thing, known in world.left.items():
        yield f"Where is the {thing}?", known
    for thing, (who, how) in world.held.items():
        if who in world.at:
            place, move = world.at[who]
            yield f"Where is the {thing}?", Answer(place, tuple(sorted(how + move)))


def _where_things_were(facts: Sequence[Fact]) -> Iterator[tuple[str, Answer]]:
    """About places to which a thing came exactly once, from another."""
    for thing, past in World(facts).past.items():
        places = [place for place, _ in past]
        for (before, _), (place, support) in pairwise(past):
            if places.count(place) == 1:
                yield f"Where was the {thing} before the {place}?", Answer(before, support)


def _who_gave_what(facts: Sequence[Fact]) -> Iterator[tuple[str, Answer]]:
    """Questions that exactly one gift answers."""
    answers: dict[str, list[Answer]] = {}
    for number, (verb, who, thing, to) in enumerate(facts):
        if verb == "give":
            for question, answer in (
                (f"Who gave the {thing} to {to}?", who),
                (f"What did {who} give to {to}?", thing),
                (f"Who did {who} give the {thing} to?", to),
                (f"Who received the {thing}?", to),
                (f"Who gave the {thing}?", who),
            ):
                answers.setdefault(question, []).append(Answer(answer, (number,)))
    return ((question, only) for question, (only, *others) in answers.items() if not others)


# -- places around each other -----------------------------------------------------------------------------------------


def _relations(rng: random.Random) -> list[Fact]:
    """Two facts about three places: the one in the middle is in both."""
    one, middle, other = rng.sample(PLACES, 3)
    facts = []
    for place in rng.sample((one, other), 2):
        pair = rng.sample((place, middle), 2)
        facts.append(Fact(rng.choice(tuple(OPPOSITE)), *pair))
    return facts


def _what_is_where(facts: Sequence[Fact]) -> Iterator[tuple[str, Answer]]:
    """Relations can be turned around, and what is north of something north of a place is north of it too."""
    relations: dict[tuple[str, str, str], Collection[int]] = {}
    for number, (side, place, other, _) in enumerate(facts):
        relations[place, side, other] = relations[other, OPPOSITE[side], place] = {number}
    for (a, side, b), numbers in list(relations.items()):  # with two facts, no chain is longer
        for (c, other_side, d), more in list(relations.items()):
            if b == c and side == other_side:
                relations.setdefault((a, side, d), {*numbers, *more})
    answers: dict[str, list[Answer]] = {}
    for (place, side, other), numbers in relations.items():
        support = tuple(sorted(numbers))
        answers.setdefault(f"What is {side} of the {other}?", []).append(Answer(place, support))
        answers.setdefault(f"What is the {place} {side} of?", []).append(Answer(other, support))
    return ((question, only) for question, (only, *others) in answers.items() if not others)


_QUESTIONS: dict[str, Callable[[Sequence[Fact]], Iterator[tuple[str, Answer]]]] = {
    "qa1": lambda facts: ((f"Where is {who}?", known) for who, known in World(facts).at.items()),
    "qa2": _where_things_are, "qa3": _where_things_were, "qa4": _what_is_where, "qa5": _who_gave_what,
}  # fmt: skip

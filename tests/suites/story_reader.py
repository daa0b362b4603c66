"""Reads Babilong's stories in English and answers questions about them; shares no code with the simulator.

Sentences that are not about the world are skipped, as a person would.
"""

import re
from collections import defaultdict

PLAIN = {
    "move": re.compile(r"([A-Z][a-z]+) (?:went|walked|moved) to the (\w+)\."),
    "take": re.compile(r"([A-Z][a-z]+) (?:took|picked up) the (\w+)\."),
    "drop": re.compile(r"([A-Z][a-z]+) (?:dropped|put down) the (\w+)\."),
    "give": re.compile(r"([A-Z][a-z]+) (?:gave|handed) the (\w+) to ([A-Z][a-z]+)\."),
    "lies": re.compile(r"The (\w+) is (north|south|east|west) of the (\w+)\."),
}


def parse(sentences):
    """[(kind, words, …)] of the sentences that are understood."""
    collected = []
    for sentence in sentences:
        matches = [(kind, *match.groups()) for kind, form in PLAIN.items() if (match := form.fullmatch(sentence))]
        assert len(matches) <= 1, sentence
        collected += matches
    return collected


def split(text):
    return re.split(r"(?<=\.) ", text)


def answers(sentences, question):
    """The set of right answers, empty if the answer cannot be known."""
    events = parse(sentences)
    for form, rule in QUESTIONS.items():
        if match := re.fullmatch(form, question):
            return rule(events, *match.groups())
    raise AssertionError(question)


def _person(events, who, time):
    """The place of a person after `time` events."""
    return next((event[2] for event in reversed(events[:time]) if event[:2] == ("move", who)), None)


def _thing(events, thing, time):
    """The place of a thing after `time` events: where its carrier is, or where it was put down."""
    for when in range(time - 1, -1, -1):
        kind, *words = events[when]
        if kind in ("take", "give") and words[1] == thing:
            return _person(events, words[-1] if kind == "give" else words[0], time)
        if kind == "drop" and words[1] == thing:
            return _person(events, words[0], when)
    return None


def _thing_before(events, thing, place):
    been = []
    for time in range(len(events) + 1):
        location = _thing(events, thing, time)
        if location is not None and been[-1:] != [location]:
            been.append(location)
    return {been[i - 1] if i else "somewhere unknown" for i, location in enumerate(been) if location == place}


def _beyond(events, side, place):
    """All places on that side of a place, step by step."""
    steps = defaultdict(set)
    for _, one, location, other in events:
        steps[other, location].add(one)
        steps[one, TURNED[location]].add(other)
    reached, edge = set(), {place}
    while edge := set().union(*(steps[each, side] for each in edge)) - reached:
        reached |= edge
    return reached


def _gifts(events):
    return [event[1:] for event in events if event[0] == "give"]


def _known(place):
    return set() if place is None else {place}


TURNED = {"north": "south", "south": "north", "east": "west", "west": "east"}
QUESTIONS = {
    r"Where is ([A-Z]\w+)\?": lambda e, who: _known(_person(e, who, len(e))),
    r"Where is the (\w+)\?": lambda e, thing: _known(_thing(e, thing, len(e))),
    r"Where was the (\w+) before the (\w+)\?": _thing_before,
    r"What is (north|south|east|west) of the (\w+)\?": _beyond,
    r"What is the (\w+) (north|south|east|west) of\?": lambda e, place, side: _beyond(e, TURNED[side], place),
    r"Who gave the (\w+) to (\w+)\?": lambda e, o, y: {g for g, thing, to in _gifts(e) if (thing, to) == (o, y)},
    r"What did (\w+) give to (\w+)\?": lambda e, x, y: {thing for g, thing, to in _gifts(e) if (g, to) == (x, y)},
    r"Who did (\w+) give the (\w+) to\?": lambda e, x, o: {to for g, thing, to in _gifts(e) if (g, thing) == (x, o)},
    r"Who received the (\w+)\?": lambda e, o: {to for _, thing, to in _gifts(e) if thing == o},
    r"Who gave the (\w+)\?": lambda e, o: {g for g, thing, _ in _gifts(e) if thing == o},
}
STARTS = {"qa1": r"Where is \(", "qa2": "Where is the", "qa3": "Where was", "qa4": "What is", "qa5": "Who|What did"}
FORMS = {task: [form for form in QUESTIONS if re.match(start, form)] for task, start in STARTS.items()}


def could_have_happened(sentences):
    """Whether every action is possible at its place. Asserts that every sentence is understood."""
    events = parse(sentences)
    assert len(events) == len(sentences)
    at, holder, lies = {}, {}, {}
    for kind, who, thing, *to in events:
        if kind == "move":
            if at.get(who) == thing:
                return False
            at[who] = thing
        elif kind == "take":
            if who not in at or thing in holder or lies.get(thing, at[who]) != at[who]:
                return False
            holder[thing] = who
        elif holder.pop(thing, None) != who:
            return False
        elif kind == "drop":
            lies[thing] = at[who]
        else:
            if to == [who] or at.get(to[0]) != at[who]:
                return False
            holder[thing] = to[0]
    return True

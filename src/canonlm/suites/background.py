"""Background of a question: neutral sentences around its facts.

A background is one stream of sentences per question. The tokenizer decides only how much of it is read: for any two
tokenizers or lengths, one text is a prefix of the other.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

from canonlm.core.errors import expected
from canonlm.suites.reading import text_of


class Background(Protocol):
    def sentences(self, seed: int, index: int) -> Iterator[str]:
        """The sentences for question `index`, without blanks around them. The generator's never end, a file's do."""
        ...


def open_background(name: str | None) -> Background:
    """None: the generator. Otherwise the text file of that path; ValueError if it cannot be read."""
    return Neutral() if name is None else TextFile(Path(name))


def fill(sentences: Iterator[str], budget: int, tokens: Callable[[str], int]) -> list[str]:
    """The fewest first sentences that have at least `budget` tokens in total; each sentence is counted by itself.

    ValueError: all sentences have fewer in total.
    """
    chosen: list[str] = []
    total = 0
    while total < budget:
        if (sentence := next(sentences, None)) is None:
            what = f"at most {total} tokens, which is all that the text has"
            raise expected("background", what, budget)
        chosen.append(sentence)
        total += tokens(sentence)
    return chosen


class TextFile:
    """Consecutive sentences of a UTF-8 text: all of them once, from a uniformly drawn one on and around the end.

    A sentence ends at a full stop, question mark or exclamation mark before a blank (so also after "Dr."), and where a
    paragraph does; a line break inside a paragraph is a blank. The text is held in memory.
    """

    def __init__(self, path: Path) -> None:
        text = text_of(path, "text", "a text file in UTF-8")
        self._sentences = [sentence for paragraph in _PARAGRAPHS.split(text) for sentence in _split(paragraph)]
        if not self._sentences:
            raise expected("text", "a text file with at least one sentence", str(path))

    def sentences(self, seed: int, index: int) -> Iterator[str]:
        start = random.Random(f"text {seed} {index}").randrange(len(self._sentences))
        return map(self._sentences.__getitem__, chain(range(start, len(self._sentences)), range(start)))


_PARAGRAPHS = re.compile(r"\n\s*\n")
_ENDS = re.compile(r"""(?<=[.!?…])\s+|(?<=[.!?…]["'”’)\]])\s+|(?<=[。！？])\s*""")


def _split(paragraph: str) -> list[str]:
    return [" ".join(sentence.split()) for sentence in _ENDS.split(paragraph) if sentence.strip()]


class Neutral:
    """Sentences of a small grammar about work, weather, animals and things: more than two hundred million different
    ones, without digits, dates and names, and without the places and objects that another suite asks about."""

    def sentences(self, seed: int, index: int) -> Iterator[str]:
        rng = random.Random(f"neutral {seed} {index}")
        while True:
            template, slots = rng.choice(_TEMPLATES)
            words = {slot: rng.sample(WORDS[slot], 2) if twice else rng.choice(WORDS[slot]) for slot, twice in slots}
            sentence = template.format(**words)
            yield sentence[0].upper() + sentence[1:]


TEMPLATES = (
    "{when}, {workers} {do} the {look} {things} {place}.",
    "{workers} {do} the {look} {things} {place} because {reason}.",
    "the {shape} {way} {leads} {past}, where {ground}.",
    "{animals} {live} {shelter} and {feed} {hour}.",
    "a {look} {thing} {rests} {place}, and {tail}.",
    "it is {ease} to {do} {things} {weather[0]} than {weather[1]}.",
    "{people} prefer {food[0]} to {food[1]}, {limit}.",
    "{sky} {drifts} over {land}, and {effect}.",
    "if {reason}, {workers} {do} {things} {place}.",
    "nobody can say why the {look} {thing} {place} {seems} so {quality}.",
)
"""`{slot}` is one of WORDS[slot]; `{slot[0]}` and `{slot[1]}` are two different ones."""

WORDS: dict[str, tuple[str, ...]] = {
    "when": (
        "before breakfast", "late in the evening", "on quiet mornings", "after a long rain", "most afternoons",
        "toward sunset", "once the fog lifts", "when the wind drops", "during the harvest", "at low tide",
        "in dry weather", "on market days", "as a rule", "long after dusk", "in the cold season", "around noon",
        "after a hard frost", "when the river is high", "while the kettle boils", "at the usual hour",
        "without being asked", "with great care",
    ),
    "workers": (
        "the potters", "the fishermen", "the carpenters", "the beekeepers", "the weavers", "the bakers",
        "the shepherds", "the ferrymen", "the stonecutters", "the farmers", "the millers", "the painters",
        "the cobblers", "the sailors", "the basket makers", "the glassblowers", "the foresters", "the bookbinders",
        "the clockmakers", "the dyers", "the roofers", "the neighbours", "the apprentices", "the lamplighters",
    ),
    "do": (
        "carry", "clean", "count", "cover", "gather", "inspect", "lift", "mark", "measure", "mend", "pack", "polish",
        "put away", "repair", "rinse", "set aside", "sort", "stack", "store", "unload", "wash", "weigh", "wrap",
    ),
    "look": (
        "heavy", "small", "empty", "narrow", "wooden", "painted", "worn", "dusty", "broken", "spare", "plain",
        "round", "striped", "crooked", "borrowed", "damp", "rusty", "polished", "nameless", "faded", "patched",
        "oversized",
    ),
    "things": (
        "barrels", "baskets", "blankets", "bottles", "boards", "bowls", "brushes", "buckets", "candles", "carts",
        "chairs", "curtains", "crates", "cushions", "jars", "kettles", "ladders", "lanterns", "nets", "pans",
        "planks", "pots", "ropes", "sacks", "shutters", "tools", "trays", "wheels",
    ),
    "thing": (
        "barrel", "basket", "blanket", "bottle", "bench", "bowl", "broom", "bucket", "candle", "cart", "chair",
        "curtain", "crate", "cushion", "jar", "kettle", "ladder", "lantern", "net", "pan", "plank", "pot", "rope",
        "sack", "shutter", "stool", "tray", "wheel",
    ),
    "place": (
        "behind the barn", "beneath the bridge", "beside the well", "near the harbour wall", "at the edge of the wood",
        "in the long shed", "along the fence", "below the dam", "on the upper terrace", "by the ferry landing",
        "next to the stables", "outside the workshop", "beneath the eaves", "at the foot of the stairs",
        "between the two walls", "in the corner of the yard", "above the cellar door", "close to the mill race",
        "beyond the last houses", "in front of the chapel",
    ),
    "reason": (
        "the roof leaks", "a storm is coming", "the road is closed", "guests are expected", "the old shelf is full",
        "the cellar is damp", "nothing else is left to do", "the boat leaves early", "the paint is still wet",
        "the floor must be swept", "the lock is stuck", "the lamp has gone out", "the mule is tired",
        "the workshop is cold", "the gate stays open", "the pump is broken",
    ),
    "shape": (
        "narrow", "winding", "muddy", "gravel", "sunken", "steep", "forgotten", "shady", "crooked", "broad",
        "overgrown", "quiet", "stony", "level",
    ),
    "way": ("path", "lane", "track", "road", "canal", "ditch", "stream", "wall", "hedge", "trail", "towpath", "creek"),
    "leads": ("winds", "runs", "bends", "leads", "curves", "climbs", "continues", "turns"),
    "past": (
        "past the saw mill", "around the hill", "toward the marsh", "through the birches", "along the lower meadow",
        "behind the brick kiln", "across the heath", "beneath the cliffs", "between two orchards",
        "down to the gravel bank", "beyond the toll house", "past a row of poplars", "up to the quarry",
        "through a gap in the rocks",
    ),
    "ground": (
        "the ground is soft", "wild mint grows", "the grass is never cut", "travellers often rest",
        "the water runs slowly", "a few sheep graze", "the stones are slippery", "the view opens", "reeds grow thick",
        "the air smells of resin", "carts can turn", "the snow stays longest", "mushrooms come up after rain",
        "the wind is always strong",
    ),
    "animals": (
        "herons", "otters", "hedgehogs", "swallows", "badgers", "lizards", "owls", "field mice", "moles", "ducks",
        "beetles", "hares", "wild goats", "bats", "crows", "toads", "squirrels", "moths", "geese", "snails",
    ),
    "live": ("nest", "hide", "sleep", "shelter", "gather", "rest", "settle", "spend the winter"),
    "shelter": (
        "among the reeds", "behind loose bark", "in hollow trees", "between the roots", "near slow water",
        "in the tall grass", "beneath flat stones", "in abandoned barns", "along the hedges", "on rocky slopes",
        "in the thick ivy", "below the bank",
    ),
    "feed": (
        "look for food", "call to each other", "drink", "come out into the open", "move in small groups",
        "follow the same tracks", "keep away from dogs", "search the shallow pools", "stay close together",
        "are easy to watch",
    ),
    "hour": (
        "at dusk", "at night", "in the early morning", "when it is warm", "after rain", "in still weather",
        "before a storm", "around midday", "when nobody is near", "as soon as the ice melts",
    ),
    "rests": ("stands", "lies", "rests", "is kept", "has been left", "is waiting"),
    "tail": (
        "nobody remembers who left it there", "it will be needed again soon", "children like to sit on it",
        "the cat sleeps beside it", "it creaks in the wind", "someone has tied a ribbon around it",
        "moss has begun to cover it", "the rain has darkened its wood", "it is too heavy for a single person",
        "visitors always ask about it", "it has never been for sale", "a spider has moved in",
        "its handle is loose", "no better place has been found for it",
    ),
    "ease": ("easier", "harder", "safer", "quicker", "slower", "more pleasant", "more tiring", "less trouble"),
    "weather": (
        "in calm weather", "in the rain", "on an empty stomach", "with a friend", "in a hurry", "after dark",
        "in thick gloves", "on frozen ground", "in bright sunshine", "at the end of a long day", "on a slope",
        "in a strong wind",
    ),
    "people": (
        "some cooks", "many children", "most travellers", "older people", "few sailors", "several neighbours",
        "careful eaters", "hungry walkers", "our cousins", "the night watchmen", "people from the coast",
        "people from the hills",
    ),
    "food": (
        "barley soup", "black tea", "fresh bread", "pickled cabbage", "roasted chestnuts", "goat cheese",
        "plum jam", "smoked trout", "baked onions", "lentil stew", "oat porridge", "honey cake", "pear juice",
        "salted butter", "boiled eggs", "bean salad", "walnut bread", "hot cider", "potato dumplings", "cherry tart",
    ),
    "limit": (
        "especially in cold weather", "at least on holidays", "unless they are in a hurry", "as far as anyone knows",
        "though not every day", "mostly out of habit", "when they have the choice", "even if it costs more",
        "but rarely admit it", "for no particular reason",
    ),
    "sky": (
        "a thin mist", "a warm breeze", "light rain", "grey smoke", "a flock of starlings", "a low cloud",
        "the smell of hay", "fine snow", "a cool shadow", "the sound of bells", "dry dust", "a single kite",
    ),
    "drifts": ("drifts", "passes", "hangs", "moves slowly", "spreads", "lingers", "floats"),
    "land": (
        "the valley", "the lower fields", "the roofs", "the water", "the hills", "the harbour", "the vineyards",
        "the market square", "the empty road", "the pine wood", "the salt marsh", "the railway line",
    ),
    "effect": (
        "the dogs begin to bark", "windows are closed", "the day grows quiet", "washing is taken down",
        "the colours fade", "the ferry slows down", "people look up", "the leaves stop moving",
        "the children run outside", "lamps are lit early", "the fishermen turn back", "work goes on as before",
        "the bees return to their hives", "the air turns cooler",
    ),
    "seems": ("seems", "looks", "feels", "appears"),
    "quality": (
        "familiar", "light", "out of place", "old", "well made", "strange", "clean", "useful", "fragile", "warm",
        "carefully kept", "often repaired",
    ),
}  # fmt: skip


def _compiled(template: str) -> tuple[str, tuple[tuple[str, bool], ...]]:
    """A template with its slots in order, and whether each takes two words."""
    slots = dict.fromkeys(re.findall(r"{(\w+)", template))
    return template, tuple((slot, f"{{{slot}[1]}}" in template) for slot in slots)


_TEMPLATES = tuple(map(_compiled, TEMPLATES))


def scatter(facts: Sequence[str], places: Sequence[float], background: Sequence[str]) -> tuple[list[str], list[int]]:
    """(all sentences, the positions of the facts among them).

    places: for each fact, how far into the background it stands, in [0, 1) and ascending: before the background's
    sentence floor(place * (sentences + 1)), or at its end.
    """
    sentences: list[str] = []
    where, used = [], 0
    for fact, place in zip(facts, places, strict=True):
        slot = int(place * (len(background) + 1))
        sentences += background[used:slot]
        where.append(len(sentences))
        sentences.append(fact)
        used = slot
    return [*sentences, *background[used:]], where

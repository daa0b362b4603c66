"""Prompts: an instruction, solved examples, the text in tags, the question.

The stories have other people, places and things than the examples, so these are never a right answer.
"""

from collections.abc import Sequence

INSTRUCTIONS = {
    "qa1": (
        "Each text below contains sentences about people who go from place to place. Everything else in it is "
        "unimportant. Say where the person in the question is, which is the place he or she went to last. Answer with "
        "one sentence like this: NAME is now in the PLACE."
    ),
    "qa2": (
        "Each text below contains sentences about people who go from place to place, pick things up and put them down. "
        "Everything else in it is unimportant. Whoever picks something up carries it along until putting it down, and "
        "there it stays. Say where the thing in the question is. Answer with one sentence like this: The THING is now "
        "in the PLACE."
    ),
    "qa3": (
        "Each text below contains sentences about people who go from place to place, pick things up and put them down. "
        "Everything else in it is unimportant. Whoever picks something up carries it along until putting it down, and "
        "there it stays. The question names a thing and a place to which it was brought. Say where the thing came "
        "from: the place where it was just before. Answer with one sentence like this: The THING was in the FIRST "
        "PLACE before it came to the SECOND PLACE."
    ),
    "qa4": (
        "Each text below contains sentences that say which place lies north, south, east or west of which other. "
        "Everything else in it is unimportant. Answer the question with one word, the name of a place."
    ),
    "qa5": (
        "Each text below contains sentences about people who go from place to place, pick things up, put them down and "
        "give them to each other. Everything else in it is unimportant. Answer the question with one word, the name of "
        "a person or of a thing."
    ),
}

EXAMPLES = {
    "qa1": (
        ("Ruth went to the barn. Felix walked to the orchard. Ruth moved to the shed.", "Where is Ruth?",
         "Ruth is now in the shed."),
        ("Victor moved to the mill. Felix went to the barn. Ruth went to the orchard.", "Where is Felix?",
         "Felix is now in the barn."),
    ),
    "qa2": (
        ("Felix went to the shed. Felix picked up the spade. Ruth moved to the mill. Felix walked to the orchard.",
         "Where is the spade?", "The spade is now in the orchard."),
        ("Ruth walked to the barn. Ruth took the ladder. Ruth put down the ladder. Ruth went to the mill.",
         "Where is the ladder?", "The ladder is now in the barn."),
    ),
    "qa3": (
        ("Victor went to the mill. Victor took the saddle. Ruth moved to the shed. Victor walked to the barn. Victor "
         "dropped the saddle.", "Where was the saddle before the barn?",
         "The saddle was in the mill before it came to the barn."),
        ("Ruth moved to the barn. Ruth picked up the spade. Ruth went to the orchard. Felix went to the barn. Ruth "
         "walked to the shed.", "Where was the spade before the shed?",
         "The spade was in the orchard before it came to the shed."),
    ),
    "qa4": (
        ("The mill is east of the barn. The orchard is south of the mill.", "What is the orchard south of?", "mill."),
        ("The shed is north of the orchard. The mill is west of the orchard.", "What is east of the mill?", "orchard."),
    ),
    "qa5": (
        ("Felix went to the barn. Ruth moved to the barn. Ruth took the ladder. Ruth handed the ladder to Felix.",
         "Who gave the ladder to Felix?", "Ruth."),
        ("Victor moved to the mill. Victor took the spade. Felix walked to the mill. Victor gave the spade to Felix. "
         "Felix put down the spade.", "Who received the spade?", "Felix."),
        ("Ruth went to the shed. Ruth picked up the saddle. Victor walked to the shed. Ruth handed the saddle to "
         "Victor.", "What did Ruth give to Victor?", "saddle."),
    ),
}  # fmt: skip
"""(text, question, answer)"""


def prompt(task: str, sentences: Sequence[str], question: str) -> str:
    """The prompt; it ends with "Answer:", without a blank."""
    examples = [
        f"{_text_and_question(text, example_question)} {answer}" for text, example_question, answer in EXAMPLES[task]
    ]
    return "\n\n".join([INSTRUCTIONS[task], *examples, _text_and_question(" ".join(sentences), question)])


def question_of(prompt: str) -> str:
    """The question at the end of a prompt."""
    return prompt.rpartition("\nQuestion: ")[2].removesuffix("\nAnswer:")


def _text_and_question(text: str, question: str) -> str:
    return f"<context>\n{text}\n</context>\nQuestion: {question}\nAnswer:"

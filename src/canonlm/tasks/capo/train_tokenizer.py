"""Train the tokenizer that Capo ships, a byte-level BPE of 3275 entries on our templates, questions and pools.

    python -m canonlm.tasks.capo.train_tokenizer [FILE]

Every pool entry and every template occurs once. So the words of the templates, which repeat, become one token each, and
names become one or two, a few of them three. The same words give the same file, byte for byte. Run it again after an
edit of templates or pools: without FILE it replaces the shipped one.
"""

import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from canonlm.core.files import write_text
from canonlm.tasks.capo.people import PRONOUNS
from canonlm.tasks.capo.pools import DAYS, MONTHS, YEARS, load
from canonlm.tasks.capo.templates import QUESTIONS, TEMPLATES, split
from canonlm.tasks.capo.tokens import SHIPPED

VOCABULARY = 3275  # entries; the number of GPT-2's tokens that the paper's Capo text uses (arXiv 2512.17351, App. A)


def corpus() -> list[str]:
    """The training texts: pieces as they occur in a text, with the space before them."""
    pools = load()
    pieces = [piece for templates in TEMPLATES.values() for template in templates for piece in split(template)]
    pieces += [f" {piece}" for question in QUESTIONS.values() for piece in question.split(" {name}")]
    pieces += [f" {word}" for word in (*PRONOUNS, *MONTHS, *DAYS, *YEARS)]
    entries = (*pools.first, *pools.middle, *pools.last, *pools.city, *pools.university, *pools.field)
    return [*pieces, *(f" {entry}" for entry in (*entries, *pools.company, *pools.company_city))]


def train() -> str:
    """The tokenizer as the text of its tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        corpus(), trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer.to_str()


def main(file: Path) -> None:
    write_text(file, train())
    print(f"{file}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED)

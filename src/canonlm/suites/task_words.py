"""A task's own words as a tokenizer, for models that were trained on it: samples as `canonlm data show` prints them."""

from difflib import get_close_matches
from typing import Any

from canonlm.tasks import Task

SHOWN = 12  # words that an error lists


class TaskWords:
    """The methods of a tokenizer that `Writer` needs. Texts are tokens with blanks between them (biographies: plain
    text). A text ends where a sample ends or the next one begins."""

    def __init__(self, task: Task) -> None:
        self.task, self.vocab = task, task.vocab
        self.bos_token_id = next((self.vocab.ids[name] for name in ("bos", "<bos>") if name in self.vocab.ids), None)
        self.eos_token_id = self.vocab.ids.get("end", self.bos_token_id)
        self.all_special_tokens: list[str] = []
        self.all_special_ids: list[int] = []

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """ValueError for a word that the task does not have."""
        if encode := getattr(self.vocab, "encode", None):
            rest = text.removeprefix("<bos>")
            begin = [self.bos_token_id] if rest != text else []
            return {
                "input_ids": [*begin, *(encode(f" {rest.strip()}") if rest.strip() else [])]
            }  # a space, as within a text
        return {"input_ids": [self._id(word) for word in text.split()]}

    def decode(self, tokens: list[int], **_: Any) -> str:
        return self.vocab.text(tokens)

    def convert_tokens_to_ids(self, words: list[str]) -> list[int]:
        return [self._id(word) for word in words]

    def _id(self, word: str) -> int:
        if (id := self.vocab.ids.get(word)) is not None:
            return id
        names = self.vocab.names
        close = get_close_matches(word, names, n=1, cutoff=0.5)
        guess = f' Did you mean "{close[0]}"?' if close else ""
        listed = ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
        raise ValueError(f'unknown word "{word}" of {self.task.name}.{guess} Words: {listed}.')

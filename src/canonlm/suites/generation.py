"""Text in, text out: generation in batches, for evaluations that grade texts, and for people."""

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from canonlm.core.errors import InvalidSetting, expected, panics_raised
from canonlm.models.build import wrap
from canonlm.models.interface import learns_positions
from canonlm.models.saved_model import quiet
from canonlm.suites.sampling import Sampling
from canonlm.train.evals.generate import NotFinite, generate

if TYPE_CHECKING:
    from canonlm.suites.task_words import TaskWords

ROWS = {"cuda": 256, "cpu": 32}  # max rows of a batch whose size is chosen automatically
CPU_TOKENS = 2**13  # max tokens of such a batch on a CPU, prompts and answers together
BYTES_PER_TOKEN = 2**18  # of a GPU's free memory, as a first guess: the cache of a model of 3B parameters
BEFORE = 8  # last tokens of the prompt with which an answer is decoded


class Writer:
    """Continues texts with a model: greedily or by `sampling`, with a cache, in batches of prompts of similar length.

    batch_size: prompts at a time; None: chosen by length and free memory, and halved whenever memory runs out.
    bos: begin every prompt with the tokenizer's BOS token.
    beyond: prompts may be longer than the model's context, if the model can read them at all.
    as_text: names of special tokens in prompts are text, as in training; else they are these tokens.

    Texts do not depend on the batches, up to the rounding of the model's dtype.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: "PreTrainedTokenizerBase | TaskWords | None",
        *,
        batch_size: int | None = None,
        bos: bool = False,
        beyond: bool = False,
        as_text: bool = False,
        sampling: Sampling | None = None,
    ) -> None:
        if tokenizer is None:
            what = "the model has none; expected a file, a folder or a name on the Hub"
            raise InvalidSetting("--tokenizer", f"--tokenizer is missing: {what}")
        if batch_size is not None and batch_size < 1:
            raise expected("--batch-size", "an integer >= 1", batch_size)
        if bos and tokenizer.bos_token_id is None:
            raise InvalidSetting("--bos", "--bos needs a tokenizer with a BOS token")
        self._model, self._bos, self._sampling = wrap(model), bos, sampling
        self._tokenizer: Any = tokenizer
        self._how = {"split_special_tokens": True} if as_text else {}
        self._file = getattr(tokenizer, "opened_from", "--tokenizer")
        self._context = None if beyond and not learns_positions(model) else self._model.context_length
        self._ends = end_tokens(model, tokenizer)
        self._batch_size, self._max_tokens = batch_size, _tokens_at_once(model.device)
        self.not_finite: set[int] = set()  # prompts of the current `write` whose logits were NaN

    def tokens(self, text: str) -> int:
        """The number of tokens in the text, without special tokens."""
        return len(self._encode(text))

    def write(
        self, prompts: Sequence[str], max_new_tokens: int, stop: Sequence[str] = (), *, done: Collection[int] = ()
    ) -> Iterator[tuple[int, str]]:
        """`(index, text)` for each prompt, as batches finish, the longest first. The text is the model's continuation:
        at most `max_new_tokens` tokens, up to its end-of-text token or the first of `stop` (neither is part of it).
        done: the indices of prompts to leave out.

        ValueError, before anything is written: a prompt with its answer is longer than the model's context. Later: the
        batch does not fit into memory (with `batch_size=None`: not even one prompt does).
        """
        ids = self.check(prompts, max_new_tokens)
        self.not_finite.clear()
        order = [index for index in range(len(ids)) if index not in done]
        return self._write(ids, order, max_new_tokens, [x for x in stop if x])

    def check(self, prompts: Sequence[str], max_new_tokens: int, name: str = "prompt {}") -> list[list[int]]:
        """The prompts in tokens. ValueError if one with its answer is longer than the model's context."""
        return [self._ids(name.format(index), prompt, max_new_tokens) for index, prompt in enumerate(prompts)]

    def stream(self, prompt: str, max_new_tokens: int, show: Callable[[str], object], stop: Sequence[str] = ()) -> None:
        """Write one prompt's text to `show`, piece by piece, as soon as nothing can change it.
        FloatingPointError: the model's logits are not finite."""
        (ids,), stop = self.check([prompt], max_new_tokens, "the prompt"), [x for x in stop if x]
        streamer = _Stream(self, ids, stop, self._all_ends(stop), show)
        if self._batch([0], [ids], max_new_tokens, stop, monitor=_Finite(), streamer=streamer) is None:
            raise ValueError(f"{len(ids) + max_new_tokens:,} tokens do not fit into memory")

    def _write(
        self, prompts: list[list[int]], order: list[int], max_new_tokens: int, stop: Sequence[str]
    ) -> Iterator[tuple[int, str]]:
        # The longest first: if they do not fit into memory, that shows at once.
        order.sort(key=lambda index: -len(prompts[index]))
        done = 0
        while done < len(order):
            longest = len(prompts[order[done]])
            width = longest + max_new_tokens
            batch = order[done : done + self._rows(width)]
            if self._model.reads_padding:
                batch = [index for index in batch if len(prompts[index]) == longest]
            texts = self._batch(batch, [prompts[index] for index in batch], max_new_tokens, stop)
            if texts is not None:
                yield from zip(batch, texts, strict=True)
                done += len(batch)
            elif self._batch_size is not None and len(batch) > 1:
                what = f"fewer than {len(batch)}: that many prompts of {width:,} tokens do not fit into memory"
                raise expected("--batch-size", what, self._batch_size)
            elif len(batch) == 1:
                raise ValueError(f"prompt {batch[0]}: its {width:,} tokens do not fit into memory")
            else:
                self._max_tokens = width * (len(batch) // 2)

    def _rows(self, width: int) -> int:
        if self._batch_size is not None:
            return self._batch_size
        rows = min(ROWS.get(self._model.device.type, ROWS["cpu"]), self._max_tokens // width)
        return 1 << (max(1, rows).bit_length() - 1)

    def _batch(
        self,
        indices: list[int],
        prompts: list[list[int]],
        max_new_tokens: int,
        stop: Sequence[str],
        *,
        monitor: NotFinite | None = None,
        **options: Any,
    ) -> list[str] | None:
        """The texts of one batch; None if it does not fit into memory."""
        monitor = monitor or NotFinite()
        ends = self._all_ends(stop)
        if stop:
            options["stopping_criteria"] = [_Stops(self, prompts, stop, ends)]
        if self._sampling is not None:
            options["logits_processor"] = self._sampling.processors(indices)
        try:
            with quiet():  # the library warns of long contexts, even if the caller wants them
                device = self._model.device
                rows = generate(self._model, prompts, max_new_tokens, ends, device, monitor=monitor, **options)
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            rows = None  # `error` holds the failed call's tensors until the end of this block
        if rows is None:
            options.clear()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return None
        self.not_finite.update(index for index, bad in zip(indices, monitor.rows, strict=True) if bad)
        texts = (self.text(prompt, row, ends) for prompt, row in zip(prompts, rows, strict=True))
        return [cut(text, stop) for text in texts]

    def _all_ends(self, stop: Sequence[str]) -> list[int]:
        """Ids that end a row, including stop strings that are special tokens, which decoded texts do not contain."""
        special = [x for x in stop if x in self._tokenizer.all_special_tokens]
        return [*self._ends, *self._tokenizer.convert_tokens_to_ids(special)]

    def text(self, prompt: list[int], row: list[int], ends: Sequence[int]) -> str:
        """The text of the tokens `row` after `prompt`. They are decoded with the end of the prompt, as some tokenizers
        drop a space at the beginning of a text."""
        row = row[:-1] if row and row[-1] in ends else row
        before = self.decode(prompt[-BEFORE:])
        both = self.decode([*prompt[-BEFORE:], *row])
        return both[len(before) :] if both.startswith(before) else self.decode(row)

    def decode(self, tokens: list[int]) -> str:
        # The library's clean-up would remove spaces that the model wrote.
        with panics_raised(self._file):
            return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _encode(self, text: str) -> list[int]:
        with panics_raised(self._file):
            return self._tokenizer(text, add_special_tokens=False, verbose=False, **self._how)["input_ids"]

    def _ids(self, name: str, prompt: str, max_new_tokens: int) -> list[int]:
        ids = self._encode(prompt)
        if self._bos or not ids:  # a model must have something to read
            begins = [self._tokenizer.bos_token_id, *self._ends]
            if (begin := next((id for id in begins if id is not None), None)) is None:
                raise ValueError(f"{name}: expected some text, as the tokenizer has no token that begins one")
            ids = [begin, *ids]
        if self._context is not None and len(ids) + max_new_tokens > self._context:
            raise ValueError(
                f"{name}: {len(ids):,} tokens, and {max_new_tokens:,} to write, are more than the model's context of "
                f"{self._context:,}"
            )
        return ids


def end_tokens(model: PreTrainedModel, tokenizer: "PreTrainedTokenizerBase | TaskWords") -> list[int]:
    """The tokens that end a text: the tokenizer's, and special tokens among those of the model's generation settings.

    (A configuration may name the end token of another tokenizer, whose id is an ordinary token in this one.)
    """
    settings = getattr(model.generation_config, "eos_token_id", None)
    named = settings if isinstance(settings, list) else [settings]
    special = {id for id, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    special.update(tokenizer.all_special_ids)
    end = tokenizer.eos_token_id
    ends = [id for id in [end, *named] if isinstance(id, int) and (id == end or id in special)]
    return list(dict.fromkeys(ends))


def cut(text: str, stop: Sequence[str]) -> str:
    """The text up to the first stop string in it."""
    return text[: min((place for x in stop if (place := text.find(x)) >= 0), default=len(text))]


class _Stops(StoppingCriteria):
    """Ends a row once its text holds a stop string."""

    def __init__(self, writer: Writer, prompts: list[list[int]], stop: Sequence[str], ends: list[int]) -> None:
        self.writer, self.prompts, self.stop, self.ends = writer, prompts, stop, ends
        self.width = max(map(len, prompts))
        self.last = max(len(x.encode()) for x in stop) + 4  # max tokens of a stop string: one per byte, and a few
        self.done = [False] * len(prompts)

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        written = input_ids[:, self.width :].tolist()
        for index, row in enumerate(written):
            # The last tokens may decode differently without those before them: all tokens decide.
            if not self.done[index] and (row[-1] in self.ends or self._has_stop(self.writer.decode(row[-self.last :]))):
                text = self.writer.text(self.prompts[index], row, self.ends)
                self.done[index] = row[-1] in self.ends or self._has_stop(text)
        return torch.tensor(self.done, device=input_ids.device)

    def _has_stop(self, text: str) -> bool:
        return any(x in text for x in self.stop)


class _Finite(NotFinite):
    """Stops generation at the first token at which the logits are not finite."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = super().__call__(input_ids, scores)
        if any(self.rows):
            raise FloatingPointError("the model's logits are not finite (NaN): it cannot write")
        return scores


class _Stream(BaseStreamer):
    """Passes on the text so far, without half a character or the possible beginning of a stop string."""

    def __init__(
        self, writer: Writer, prompt: list[int], stop: Sequence[str], ends: list[int], show: Callable[[str], object]
    ) -> None:
        self.writer, self.prompt, self.stop, self.ends, self.show = writer, prompt, stop, ends, show
        self.row: list[int] | None = None  # None until the prompt, which comes first, has passed
        self.shown = 0

    def put(self, value: Tensor) -> None:
        if self.row is None:
            self.row = []
            return
        self.row += value.flatten().tolist()
        text = self._text()
        settled = len(text.rstrip("\ufffd"))
        for x in self.stop:
            held = (k for k in range(min(len(x), settled), 0, -1) if text[:settled].endswith(x[:k]))
            settled -= next(held, 0)
        self._show(text[:settled])

    def end(self) -> None:
        self._show(self._text())

    def _text(self) -> str:
        return cut(self.writer.text(self.prompt, self.row or [], self.ends), self.stop)

    def _show(self, text: str) -> None:
        if len(text) > self.shown:
            self.show(text[self.shown :])
            self.shown = len(text)


def _tokens_at_once(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_TOKENS
    return torch.cuda.mem_get_info(device)[0] // BYTES_PER_TOKEN


def _out_of_memory(error: BaseException) -> bool:
    message = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        text in message for text in ("out of memory", "can't allocate memory", "alloc_failed")
    )

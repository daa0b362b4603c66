"""Our models as a model class of the harness: `--model canonlm --model_args pretrained=RUN,bos=true`."""

import copy
import inspect
import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM  # after all others, as an empty registry alone is filled with them
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor
from transformers import LogitsProcessorList

from canonlm.core.borrowed import without_settings
from canonlm.core.errors import InvalidSetting, expected, panics_raised, unknown
from canonlm.models.build import wrap
from canonlm.models.interface import learns_positions
from canonlm.suites.generation import CPU_TOKENS, end_tokens
from canonlm.suites.load_model import Subject, open_model
from canonlm.train.evals.generate import NotFinite

DTYPES = {"auto": None, "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""The harness's names of dtypes."""

_log = logging.getLogger("lm_eval.models.huggingface")


@register_model("canonlm")
class CanonLM(HFLM):
    """Every model that `canonlm.suites.load_model` opens: runs, saved and published checkpoints, transformers.

    The scoring is the harness's own for such models. What differs:

    - BOS is optional, whatever the tokenizer adds by itself: off by default, and with `bos` one BOS token begins every
      text that does not begin with it. It is never scored: all tokens of an answer count, and all tokens of a text
      whose perplexity is measured, where the first token follows it in any case.
    - Softmax is computed in at least float32.
    - Without a GPU, an automatic batch size is the one that gives `CPU_TOKENS` tokens.
    - Decoding is greedy, unless the task says otherwise: the model's own generation settings do not count.
    - A model without a length limit reads prompts to be continued in full, and so does any model with `beyond`.

    Otherwise, as in the harness, a text longer than the model's context loses its beginning, BOS included; an empty
    context is replaced by the BOS token, or else the EOS token.
    """

    logits_cache: bool
    _longest: int | None = None  # max tokens of a prompt and its continuation, during `generate_until`
    _uncut = False  # whether `_longest` is then the model's limit

    def __init__(
        self,
        pretrained: str | Subject | None = None,
        bos: bool = False,
        step: int | None = None,
        variant: str | None = None,
        tokenizer: str | None = None,
        dtype: str | None = None,
        device: str | None = None,
        trust_remote_code: bool = False,
        max_length: int | None = None,
        beyond: bool = False,
        batch_size: int | str = 1,
        max_batch_size: int = 64,
        **others: Any,
    ) -> None:
        """
        Args:
            pretrained: an opened model, or the `source` for `open_model`, which also takes `step`, `variant`,
                `tokenizer`, `dtype`, `device` and `trust_remote_code`.
            bos: whether texts begin with a BOS token.
            max_length: max tokens that are read at once. Default: `max_position_embeddings` of the configuration, else
                2048; prompts that a model without a limit continues are read in full.
            beyond: prompts that are continued are read in full, even if they are longer than that.
            batch_size: a number, or "auto": found by trying, from `max_batch_size` down.

        ValueError: a model without a tokenizer, `bos` without a BOS token, an unknown argument.
        """
        for name in others:
            known = set(inspect.signature(type(self).__init__).parameters) - {"self", "others"}
            raise unknown("model argument", name, known)
        if pretrained is None:
            raise ValueError("pretrained is missing: a run or a saved model, as in --model_args pretrained=runs/mine")
        for name, value in (("bos", bos), ("beyond", beyond)):
            if not isinstance(value, bool):
                raise expected(name, "true or false", value)
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            device = None  # the harness's command line has cuda:0 as its default
        if not isinstance(pretrained, Subject):
            pretrained = open_model(
                str(pretrained), step=step, variant=None if variant is None else str(variant), tokenizer=tokenizer,
                dtype=DTYPES.get(dtype, dtype) if dtype else None, device=device or "auto",
                trust_remote_code=trust_remote_code,
            )  # fmt: skip
        subject = pretrained
        source = subject.about.get("source", subject.model.name_or_path)
        if subject.tokenizer is None:
            what = "the model has none; expected a file, a folder or a name on the Hub"
            raise InvalidSetting("tokenizer", f"tokenizer is missing: {what}")
        if bos and subject.tokenizer.bos_token_id is None:
            raise expected("bos", f"false, as the tokenizer of {source} has no BOS token", bos)
        self._file = getattr(subject.tokenizer, "opened_from", source)
        self._ends = end_tokens(subject.model, subject.tokenizer)
        model: Any = without_settings(subject.model)
        self._wrapped = wrap(subject.model)
        model.generate = self._wrapped.generate
        with _without_warnings():  # that an opened model takes no arguments for opening it
            super().__init__(
                pretrained=model,
                backend="causal",
                tokenizer=copy.deepcopy(subject.tokenizer),  # which gets a padding token
                max_length=max_length,
                batch_size=batch_size,
                max_batch_size=max_batch_size,
                softmax_dtype=torch.promote_types(subject.model.dtype, torch.float32),
                add_bos_token=False,
            )
        self.pretrained, self.bos, self._about = source, bos, subject.about
        self.cut = 0  # texts so far that were longer than the model and lost their beginning
        self.questions = self.not_finite = 0  # questions so far, and those in which the model's logits were not finite
        self._beyond = beyond
        self._unlimited = max_length is None and self._wrapped.context_length is None

    @property
    def max_length(self) -> int:
        return self._longest if self._uncut and self._longest else super().max_length

    @property
    def prefix_token_id(self) -> int:
        if (prefix := super().prefix_token_id) is None:
            raise expected("tokenizer", "one with a BOS or an EOS token: an answer without a context follows it", None)
        return prefix

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """The tokens of a text. add_special_tokens: False for text that follows other text."""
        with panics_raised(self._file):
            ids = self.tokenizer.encode(string, add_special_tokens=False, verbose=False)
        if self.bos and add_special_tokens is not False and ids[:1] != [self.tokenizer.bos_token_id]:
            ids = [self.tokenizer.bos_token_id, *ids]
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Token ids and attention mask, [strings, longest]."""
        rows = [self.tok_encode(string) or [self.prefix_token_id] for string in strings]
        if left_truncate_len and (longest := max(map(len, rows))) > left_truncate_len:
            _log.warning("a prompt of %d tokens loses its beginning: %d fit", longest, left_truncate_len)
            self.cut += sum(len(row) > left_truncate_len for row in rows)
            rows = [row[-left_truncate_len:] for row in rows]
        batch = self.tokenizer.pad({"input_ids": rows}, padding_side=padding_side, return_tensors="pt", verbose=False)
        return batch["input_ids"], batch["attention_mask"]

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> Any:
        """Returns None for None: the harness decodes the EOS token even if the tokenizer has none."""
        if tokens is None:
            return None
        with panics_raised(self._file):
            return super().tok_decode(tokens, skip_special_tokens=skip_special_tokens)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        # The harness puts the prefix token before a text. With a BOS of its own the text would have two, the second
        # one scored.
        bos, self.bos = self.bos, False
        try:
            results = super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        finally:
            self.bos = bos
        self._count(requests, map(math.isnan, results))
        return results

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        results = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        self._count(requests, (math.isnan(likelihood) for likelihood, _ in results))
        return results

    def _count(self, requests: Any, bad: Iterable[bool]) -> None:
        """Count questions. A question may have several requests, one for each of its possible answers."""
        questions: dict[Any, bool] = {}
        for request, broken in zip(requests, bad, strict=True):
            key = (request.task_name, request.doc_id)
            questions[key] = questions.get(key, False) or broken
        self.questions += len(questions)
        self.not_finite += sum(questions.values())

    def _model_generate(self, context: Tensor, attention_mask: Tensor, max_length: int, **kwargs: Any) -> Tensor:
        if self._wrapped.reads_padding and not attention_mask.all():  # prompts of one length at a time
            lengths = attention_mask.sum(1)
            ids = context.new_full((len(context), max_length), self.tokenizer.pad_token_id)
            for length in lengths.unique().tolist():
                rows, padding = lengths == length, context.shape[1] - length
                part = context[rows, padding:]
                part = self._model_generate(part, torch.ones_like(part), max_length - padding, **kwargs)
                ids[rows, padding : padding + part.shape[1]] = part
            return ids
        monitor = NotFinite()
        kwargs |= {"logits_processor": LogitsProcessorList([monitor]), "eos_token_id": self._ends or None}
        ids = super()._model_generate(context, max_length, attention_mask=attention_mask, **kwargs)
        self.questions += len(context)
        self.not_finite += int(torch.tensor(monitor.rows).view(len(context), -1).any(1).sum())  # of all beams
        return ids

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        max_new_tokens = max(
            normalize_gen_kwargs(request.args[1], self.max_gen_toks)["max_gen_toks"] for request in requests
        )
        longest = max_new_tokens + max(1, *(len(self.tok_encode(request.args[0])) for request in requests))
        if self._beyond and longest > self.max_length and learns_positions(self.model):
            room = self.max_length - max_new_tokens
            what = f"at most {room:,} tokens, as the model has learned no positions after those"
            raise expected("prompt", what, longest - max_new_tokens)
        uncut = self._beyond or self._unlimited
        if max_new_tokens >= self.max_length and not uncut:
            what = f"more than the {max_new_tokens} tokens that the task lets a model write"
            raise expected("max_length", what, self.max_length)
        self._longest, self._uncut = longest, uncut
        try:
            return super().generate_until(requests, disable_tqdm=disable_tqdm)
        finally:
            self._longest, self._uncut = None, False

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        # A context of blanks alone counts as empty, as they belong to the answer's first token.
        context_ids, answer_ids = super()._encode_pair(context, continuation)
        return context_ids or [self.prefix_token_id], answer_ids

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        if (longest := max((len(answer) for _, _, answer in requests), default=0)) > self.max_length:
            raise expected("max_length", f"at least {longest}, the tokens of the longest answer", self.max_length)
        self.cut += sum(len(ids) + len(answer) > self.max_length + 1 for _, ids, answer in requests)
        # The harness reads several answers off one forward pass if they only differ in their last token, and (in
        # 0.4.13) takes the wrong positions if one of them also begins earlier.
        lengths: dict[tuple[int, ...], int] = {}
        alike = all(lengths.setdefault((*ids, *answer[:-1]), len(answer)) == len(answer) for _, ids, answer in requests)
        shared, self.logits_cache = self.logits_cache, self.logits_cache and alike
        try:
            return super()._loglikelihood_tokens(requests, *args, **kwargs)
        finally:
            self.logits_cache = shared

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            return self.model(inps, use_cache=False).logits

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> int:
        if self.device.type != "cpu":
            return super()._detect_batch_size(requests, pos)
        length = sum(map(len, requests[pos][1:])) if requests else self._longest or self.max_length
        return max(1, min(self.max_batch_size, CPU_TOKENS // min(length, self.max_length)))

    def get_model_info(self) -> dict[str, Any]:
        """The model's entry in the harness's results, which asks for it after all questions."""
        if self.not_finite:
            why = "the model's logits are not finite (NaN) in %s of %s questions"
            _log.warning(why, f"{self.not_finite:,}", f"{self.questions:,}")
        return {
            "questions": self.questions,
            "not_finite": self.not_finite,
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": str(self.model.dtype),
            "model_revision": self.revision,
            "model_sha": "",
            "canonlm": self._about,
        }


@contextmanager
def _without_warnings() -> Iterator[None]:
    level = _log.level
    _log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        _log.setLevel(level)

"""Equivalent ways to compute a model's output. Each case returns the error of its logits (`Subject.error`)."""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from canonlm.canonize.check.reference import LENGTHS, NEW, Subject
from canonlm.core.cache_name import CACHE
from canonlm.core.errors import Unsupported

PIECES = (4, 1, 3, 1)
"""Tokens of the pieces of a prompt."""

KEPT = 6
"""Tokens that stay when later ones are removed from the cache."""


@dataclass(frozen=True)
class Case:
    """about: one line. limit: the max error that passes; None: the limit of the model's precision."""

    about: str
    run: Callable[[Subject], float]
    limit: float | None = None


CASES: dict[str, Case] = {}


def case(name: str, about: str, limit: float | None = None) -> Callable[[Callable[[Subject], float]], None]:
    def add(run: Callable[[Subject], float]) -> None:
        CASES[name] = Case(about, run, limit)

    return add


@case("causality", "later tokens do not change earlier logits")
def _(subject: Subject) -> float:
    row, other = subject.rows[1], subject.rows[1].clone()
    other[KEPT:] = subject.rows[0][KEPT:]
    return subject.error(subject.truth(other)[:KEPT], subject.truth(row)[:KEPT])


@case("greedy", "token by token with a cache, in a batch")
def _(subject: Subject) -> float:
    return subject.written(list(subject.rows), subject.write(subject.rows))


@case("batch", "a batch and its rows one by one")
def _(subject: Subject) -> float:
    many = subject.write(subject.rows)
    ones = [subject.write(row[None]) for row in subject.rows]
    return max(
        subject.error(torch.stack(many.logits)[:, index], torch.stack(one.logits)[:, 0])
        if torch.equal(many.sequences[index], one.sequences[0])
        else subject.greedy(subject.rows[index], one.sequences[0, -NEW:])
        for index, one in enumerate(ones)
    )


@case("left padding", "prompts of several lengths, padded on the left")
def _(subject: Subject) -> float:
    ids = pad_sequence(subject.prompts, batch_first=True, padding_side="left")
    return subject.written(subject.prompts, subject.write(ids, attention_mask=_mask(ids, "left")))


@case("right padding", "prompts padded on the right, then decoding")
def _(subject: Subject) -> float:
    ids = pad_sequence(subject.prompts, batch_first=True)
    mask = _mask(ids, "right")
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits, cache = subject.step(ids, attention_mask=mask, position_ids=positions)
    written = [[row[length - 1]] for row, length in zip(logits, LENGTHS, strict=True)]
    lengths = mask.sum(1, keepdim=True)
    for number in range(NEW - 1):
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        token = subject.following[:, number, None]
        logits, cache = subject.step(token, cache, attention_mask=mask, position_ids=lengths + number)
        for row, steps in zip(logits, written, strict=True):
            steps.append(row[0])
    texts = [torch.cat([p, new[: NEW - 1]]) for p, new in zip(subject.prompts, subject.following, strict=True)]
    return max(
        subject.error(torch.stack(steps), subject.truth(text)[length - 1 :])
        for steps, text, length in zip(written, texts, LENGTHS, strict=True)
    )


@case("pieces", "a prompt in uneven pieces, with a cache")
def _(subject: Subject) -> float:
    cache, parts = None, []
    for piece in subject.rows.split(PIECES, dim=1):
        logits, cache = subject.step(piece, cache)
        parts.append(logits)
    rows = zip(torch.cat(parts, dim=1), subject.rows, strict=True)
    return max(subject.error(one, subject.truth(row)) for one, row in rows)


@case("prefill in chunks", "generate(prefill_chunk_size=4)")
def _(subject: Subject) -> float:
    return subject.written(list(subject.rows), subject.write(subject.rows, prefill_chunk_size=4))


@case("packed documents", "two documents in a row, position_ids that start again")
def _(subject: Subject) -> float:
    if "position_ids" not in subject.accepts:
        raise Unsupported("position_ids", "its forward takes no position_ids")
    first, second = subject.rows[0], subject.rows[1]
    positions = torch.cat([torch.arange(len(row), device=row.device) for row in (first, second)])[None]
    with torch.no_grad():
        tokens = torch.cat([first, second])[None]
        logits = subject.forward(tokens, position_ids=positions, **subject.without_cache).logits[0]
    return max(
        subject.error(logits[: len(first)], subject.truth(first)),
        subject.error(logits[len(first) :], subject.truth(second)),
    )


@case("crop", "tokens are removed from the cache and read again")
def _(subject: Subject) -> float:
    _, cache = _recorded(subject, subject.rows)
    cache.crop(KEPT - subject.rows.shape[1])
    logits, _ = subject.step(subject.rows[:, KEPT:], cache)
    return max(subject.error(one, subject.truth(row)[KEPT:]) for one, row in zip(logits, subject.rows, strict=True))


@case("rewind", "candidate tokens are removed from the cache after the first k, and other tokens follow")
def _(subject: Subject) -> float:
    text, errors = subject.rows[1], []
    _, cache = _recorded(subject, text[None])
    for kept, candidates, token in zip(
        (2, 0, 3, 4), subject.rows[0].unfold(0, 4, 1), subject.following[0], strict=False
    ):
        logits, cache = subject.step(candidates[None], cache)
        errors.append(subject.error(logits[0], subject.truth(torch.cat([text, candidates]))[-4:]))
        cache.crop(kept - 4)
        logits, cache = subject.step(token.view(1, 1), cache)
        text = torch.cat([text, candidates[:kept], token[None]])
        errors.append(subject.error(logits[0], subject.truth(text)[-1:]))
    return max(errors)


@case("prompt lookup", "candidate tokens from the prompt, some of them rejected")
def _(subject: Subject) -> float:
    prompt = subject.rows[1][:3].repeat(3)
    output = subject.write(prompt[None], prompt_lookup_num_tokens=3)
    return subject.greedy(prompt, output.sequences[0, len(prompt) :])


@case("assisted", "candidate tokens from another model, some of them rejected")
def _(subject: Subject) -> float:
    assistant = copy.deepcopy(subject.model)
    generator = torch.Generator().manual_seed(subject.seed)
    with torch.no_grad():
        for parameter in assistant.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(0.1 * parameter.std(correction=0) * noise)
    prompt = subject.rows[1]
    output = subject.write(prompt[None], assistant_model=assistant)
    return subject.greedy(prompt, output.sequences[0, len(prompt) :])


@case("static cache", "generate(cache_implementation='static')")
def _(subject: Subject) -> float:
    return subject.written(list(subject.rows), subject.write(subject.rows, cache_implementation="static"))


@case("beams", "log-probabilities of the sequences that beam search returns")
def _(subject: Subject) -> float:
    output = subject.write(subject.rows, num_beams=3, num_return_sequences=3, length_penalty=0.0)
    errors = []
    for index, sequence in enumerate(output.sequences):
        prompt, new = subject.rows[index // 3], sequence[-NEW:]
        true = subject.truth(torch.cat([prompt, new[:-1]]))[len(prompt) - 1 :]
        total = true.double().log_softmax(-1).gather(1, new[:, None]).sum()
        errors.append(float((output.sequences_scores[index] - total).abs().nan_to_num(nan=torch.inf)) / NEW)
    return max(errors)


@case("sampling", "the same seed draws the same tokens")
def _(subject: Subject) -> float:
    outputs = []
    for _ in range(2):
        torch.manual_seed(subject.seed)
        outputs.append(subject.write(subject.rows, do_sample=True, top_k=0))
    if not torch.equal(outputs[0].sequences, outputs[1].sequences):
        return torch.inf
    return subject.written(list(subject.rows), outputs[0])


@case("gradient checkpointing", "gradients with recomputed blocks")
def _(subject: Subject) -> float:
    model = copy.deepcopy(subject.model).train()
    gradients = []
    for recomputed in (False, True):
        if recomputed:
            newer = getattr(model, "activation_checkpointing_enable", None)  # its name from transformers 6 on
            (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
        torch.manual_seed(subject.seed)
        logits = model(input_ids=subject.rows, **subject.without_cache).logits
        targets = subject.rows.roll(-1, dims=1)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()
        gradients.append(torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]))
        model.zero_grad()
    if gradients[0].shape != gradients[1].shape:
        return torch.inf
    return float((gradients[1] - gradients[0]).abs().max() / gradients[0].abs().max())


@case("save and load", "logits of the model, saved and loaded again")
def _(subject: Subject) -> float:
    with tempfile.TemporaryDirectory() as folder:
        subject.model.save_pretrained(folder)
        loaded: Any = type(subject.model).from_pretrained(folder, dtype=subject.model.dtype)
    loaded = loaded.to(subject.model.device).eval()
    return subject.error(Subject(loaded, subject.seed).truth(subject.rows[1]), subject.truth(subject.rows[1]))


@case("bfloat16", "logits of the same weights in bfloat16", limit=0.5)
def _(subject: Subject) -> float:
    rounded: Any = copy.deepcopy(subject.model)
    rounded = rounded.to(torch.bfloat16)
    return subject.error(Subject(rounded, subject.seed).truth(subject.rows[1]), subject.truth(subject.rows[1]))


def _recorded(subject: Subject, tokens: Tensor) -> tuple[Tensor, Any]:
    """As `Subject.step`, with a cache that can be cropped later."""
    cache = None
    if subject.accepts & {"cache", "past_key_values"}:
        cache = DynamicCache(config=subject.model.config.get_text_config())
        if hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()  # as the library does before it removes tokens
    logits, cache = subject.step(tokens, cache)
    if not hasattr(cache, "crop"):
        raise Unsupported(CACHE, f"{type(cache).__name__} cannot be cropped")
    return logits, cache


def _mask(ids: Tensor, side: str) -> Tensor:
    places, lengths = torch.arange(ids.shape[1], device=ids.device), torch.tensor(LENGTHS, device=ids.device)[:, None]
    return ((places < lengths) if side == "right" else (places >= ids.shape[1] - lengths)).long()

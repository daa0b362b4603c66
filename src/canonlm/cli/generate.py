"""`canonlm generate`: continue a prompt, or each prompt of a file."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from canonlm.cli import later
from canonlm.cli.options import Device, Dtype, Model, Step, Tokenizer, TrustModel, Variant, opened
from canonlm.cli.status import Count, load_torch
from canonlm.core.errors import expected, writing
from canonlm.core.files import append, make_folder, write_text
from canonlm.core.untrusted import SURROGATE, is_unicode, parse_json
from canonlm.suites.reading import text_of

PROMPT = typer.Argument(
    help="The text to continue. For a run of `canonlm play`: the task's own words, as `canonlm data show` prints "
    'them, such as "bos x3 x1 x4 ans".',
    metavar="PROMPT",
)
MAX_TOKENS = typer.Option(
    help="The maximum number of tokens to write. Default: 128, or as many as fit after PROMPT.", min=1
)
TEMPERATURE = typer.Option(help="0: always the likeliest token. 1: draw by the model's own probabilities.", min=0)
TOP_K = typer.Option(help="Draw from the K likeliest tokens only.", min=1)
TOP_P = typer.Option(help="Draw from the likeliest tokens whose probabilities add up to this.")
SEED = typer.Option(help="Seed of the draws: the same seed writes the same text.")
BOS = typer.Option(
    "--bos/--no-bos", help="Begin the prompt with the tokenizer's BOS token. Default: as the tokenizer does by itself."
)
STOP = typer.Option(help="Stop before this text. Repeat for more.")
PROMPTS = typer.Option(
    help='A file of prompts in place of PROMPT: one per line or, in a .jsonl file, {"prompt": …} per line.'
)
OUT = typer.Option(help='With --prompts: the file to write, {"prompt": …, "text": …} per line.')
BATCH_SIZE = typer.Option(help="With --prompts: prompts at a time. Default: found automatically.", min=1)

DEFAULT_TOKENS = 128  # of an answer, without --max-tokens


def generate(
    model: Model,
    prompt: Annotated[str | None, PROMPT] = None,
    max_tokens: Annotated[int | None, MAX_TOKENS] = None,
    temperature: Annotated[float, TEMPERATURE] = 0.0,
    top_k: Annotated[int | None, TOP_K] = None,
    top_p: Annotated[float | None, TOP_P] = None,
    seed: Annotated[int, SEED] = 0,
    bos: Annotated[bool | None, BOS] = None,
    stop: Annotated[list[str] | None, STOP] = None,
    prompts: Annotated[Path | None, PROMPTS] = None,
    out: Annotated[Path | None, OUT] = None,
    batch_size: Annotated[int | None, BATCH_SIZE] = None,
    step: Step = None,
    variant: Variant = None,
    tokenizer: Tokenizer = None,
    dtype: Dtype = None,
    device: Device = "auto",
    trust_remote_code: TrustModel = False,
) -> int:
    """Let a model continue a text: word by word on the terminal, or for a whole file of prompts.

    `canonlm generate runs/my-run "Once upon a time" --temperature 0.8` draws from the model's probabilities; without a
    temperature it always writes the likeliest token. `--prompts FILE --out ANSWERS.jsonl` answers every line of a
    file, in batches.
    """
    if prompt is None and prompts is None:
        raise ValueError("PROMPT is missing: a text (or --prompts with a file of them)")
    if prompt is not None and prompts is not None:
        raise ValueError("PROMPT cannot be used with --prompts")
    if prompts is not None and out is None:
        raise ValueError("--prompts needs --out, the file to write")
    if prompts is None and out is not None:
        raise ValueError("--out only works with --prompts")
    if out is not None and out.exists():
        raise expected("--out", "a file that does not exist yet", str(out))
    if "" in (stop or []):
        raise expected("--stop", "some text", "")
    for name, text in [("PROMPT", prompt or ""), *(("--stop", each) for each in stop or [])]:
        if not is_unicode(text):
            raise expected(name, f"text without {SURROGATE}", text)
    if temperature == 0 and (top_k, top_p) != (None, None):
        raise ValueError(f"{'--top-k' if top_k is not None else '--top-p'} only works with a --temperature above 0")
    rows = [] if prompts is None else _read(prompts)

    load_torch()
    sampling = later.sampling.Sampling(temperature, top_k, top_p, seed) if temperature != 0 else None
    subject = opened(
        model, step=step, variant=variant, tokenizer=tokenizer, dtype=dtype, device=device,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    words: Any = subject.tokenizer
    if words is None and subject.run is not None and (task := subject.run.built_task) is not None:
        words = later.task_words.TaskWords(task)  # what a run of `canonlm play` reads and writes
    begin = _adds_bos(words) if bos is None else bos
    writer = later.generation.Writer(subject.model, words, batch_size=batch_size, bos=begin, sampling=sampling)
    if prompt is not None:
        limit = max_tokens or DEFAULT_TOKENS
        if max_tokens is None and (context := later.models_build.wrap(subject.model).context_length) is not None:
            limit = max(1, min(limit, context - max(1, begin + writer.tokens(prompt))))
        writer.check([prompt], limit, "the prompt")  # before anything is printed
        print(prompt, end="", flush=True)
        try:
            writer.stream(prompt, limit, lambda text: print(_shown(text), end="", flush=True), stop or [])
        finally:
            print()
        return 0
    assert out is not None
    limit, stop = max_tokens or DEFAULT_TOKENS, stop or []
    about = [subject.about[key] for key in ("fingerprint", "tokenizer", "checksum", "dtype")]
    key = hashlib.sha256(json.dumps([about, rows, limit, stop, begin, repr(sampling)]).encode()).hexdigest()
    answered = out.with_name(f"{out.name}.{key[:8]}.part")
    try:
        _answer(writer, rows, limit, stop, out, answered)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the answers so far are in {answered}. The same command continues.") from None
    return 0


def _shown(text: str) -> str:
    """A model's text without the control characters that a terminal would obey."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)


def _answer(
    writer: "later.generation.Writer",
    rows: list[dict[str, Any]],
    max_tokens: int,
    stop: list[str],
    out: Path,
    answered: Path,
) -> None:
    """Answer all prompts, in order, into a file that is complete or absent. `answered` has the answers until then, and
    those that an earlier process wrote. FloatingPointError: the model's logits are not finite for any of them."""
    with writing("--out", out, "file"):
        make_folder(out.parent)
        kept = later.run_answers.rows_in(answered, cut=True, parts={"text": str, "finite": bool})
    answers = {index: row for index, row in kept.items() if index < len(rows)}
    with Count(len(rows), "written") as count:
        count("written", len(answers))
        for index, text in writer.write([row["prompt"] for row in rows], max_tokens, stop, done=answers):
            answers[index] = {"index": index, "text": text, "finite": index not in writer.not_finite}
            with writing("--out", answered, "file"), append(answered) as file:
                file.write(f"{json.dumps(answers[index])}\n".encode())
            count("written", len(answers))
    if bad := sum(not answer["finite"] for answer in answers.values()):
        why = f"the model's logits are not finite (NaN) in {bad:,} of {len(rows):,} prompts"
        if bad == len(rows):
            answered.unlink()
            raise FloatingPointError(f"{why}: nothing is written")
        print(f"canonlm: {why}", file=sys.stderr)
    lines = [json.dumps({**row, "text": answers[index]["text"]}, ensure_ascii=False) for index, row in enumerate(rows)]
    with writing("--out", out, "file"):
        write_text(out, "".join(f"{line}\n" for line in lines))
        answered.unlink(missing_ok=True)  # the same command, at the same time, may have done it
    print(f"{len(rows):,} prompts answered: {out}")


def _read(file: Path) -> list[dict[str, Any]]:
    """Read the prompts of a file, one row per prompt; other keys of a JSON row are copied to the answer's row."""
    lines = text_of(file, "--prompts", "a text file that can be read").split("\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row: Any = {"prompt": line.removesuffix("\r")}
        if file.suffix.lower() == ".jsonl":
            try:
                row = parse_json(line, "")
            except ValueError:
                row = None
            if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
                raise expected("--prompts", '{"prompt": "…"} in every line', f"{file}, line {number}")
            if "text" in row:
                what = 'lines without the key "text", which is for the answer'
                raise expected("--prompts", what, f"{file}, line {number}")
            if not is_unicode(json.dumps(row, ensure_ascii=False)):
                raise expected("--prompts", f"text without {SURROGATE}", f"{file}, line {number}")
        rows.append(row)
    if not rows:
        raise expected("--prompts", "a file with at least one prompt", str(file))
    return rows


def _adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts a BOS token before a text by itself."""
    if tokenizer is None or tokenizer.bos_token_id is None:
        return False
    return getattr(tokenizer, "task", None) is None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]

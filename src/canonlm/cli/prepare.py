"""`canonlm data prepare` and `canonlm data check`: from files of text to the token shards that training reads."""

from pathlib import Path
from typing import Annotated

import typer

from canonlm.cli import later
from canonlm.cli.options import NewFolder
from canonlm.cli.status import Reading, keep_going, say
from canonlm.core.errors import expected
from canonlm.data.index import Index
from canonlm.data.index import check as compare

FOLDER = typer.Argument(help="A folder that `canonlm data prepare` wrote.", metavar="FOLDER")
OPTIONS = typer.Argument(help="Options of the executor, such as partition=cpu time=4:00:00.", metavar="KEY=VALUE")
INPUT = typer.Option(
    "--input",
    help="A file (.jsonl, .parquet, .txt; .gz, .zst), a folder, a glob, or hf:NAME[:config[:split]]. Repeat for more.",
)
TOKENIZER = typer.Option(help="bytes, or a file: tokenizer.json, a tiktoken file, a sentencepiece model.")
TEXT_KEY = typer.Option(help="The key or column that has the text.")
GLOB = typer.Option(help="Which files of a folder or glob to read, such as '*.py'.")
EXCLUDE = typer.Option(help="Skip folders of this name. Repeat for more.")
BOS = typer.Option("--bos/--no-bos", help="Start every document with the tokenizer's BOS token.")
EOS = typer.Option("--eos/--no-eos", help="End every document with the tokenizer's EOS token.")
VALIDATION = typer.Option(help="The share of documents to hold out, such as 0.01.")
SEED = typer.Option(help="Decides which documents are held out.", min=0)
TASKS = typer.Option(help="How many parts the work is split into. Default: one per 32 MB of input.", min=1)
WORKERS = typer.Option(help="How many parts are processed at a time. Default: one per core.", min=1)
MAX_BAD = typer.Option(help="How many bad lines are accepted.", min=0)
EXECUTOR = typer.Option(help="local, slurm or ray.")


def prepare(
    out: NewFolder,
    inputs: Annotated[list[str], INPUT],
    tokenizer: Annotated[str, TOKENIZER],
    options: Annotated[list[str] | None, OPTIONS] = None,
    text_key: Annotated[str, TEXT_KEY] = "text",
    glob: Annotated[str | None, GLOB] = None,
    exclude: Annotated[list[str] | None, EXCLUDE] = None,
    bos: Annotated[bool, BOS] = True,
    eos: Annotated[bool, EOS] = True,
    validation: Annotated[float, VALIDATION] = 0.0,
    seed: Annotated[int, SEED] = 0,
    tasks: Annotated[int | None, TASKS] = None,
    workers: Annotated[int | None, WORKERS] = None,
    max_bad: Annotated[int, MAX_BAD] = 0,
    executor: Annotated[str, EXECUTOR] = "local",
) -> int:
    """Turn text into token shards that training reads: tokenised in parallel, checksummed, the same every time.

    Bad lines are counted and listed in OUT/bad-lines.jsonl, never dropped silently. If it was stopped, the same command
    continues.
    """
    given = dict(option.partition("=")[::2] for option in options or [])
    for option in options or []:
        if "=" not in option:
            raise expected("executor option", "KEY=VALUE", option)
    keep_going()
    try:
        with Reading() as bar:
            index = later.prepare.prepare(
                out, inputs, tokenizer=tokenizer, text_key=text_key, glob=glob, exclude=exclude or (), bos=bos, eos=eos,
                validation=validation, seed=seed, tasks=tasks, workers=workers, max_bad=max_bad, executor=executor,
                options=given, on_progress=bar,
            )  # fmt: skip
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command continues") from None
    if index is None:
        say(f"{out}: submitted; when it is done, {out}/index.json exists; logs are in {out}/work")
    else:
        _print_index(out, index)
    return 0


def check(folder: Annotated[Path, FOLDER]) -> int:
    """Read all shards of a folder again and compare their sha256 with the index."""
    _print_index(folder, compare(folder))
    say("every file is as it was written")
    return 0


def _print_index(folder: Path, index: Index) -> None:
    for split, shards in index.splits.items():
        documents, tokens, size = (
            sum(getattr(shard, key) for shard in shards) for key in ("documents", "tokens", "bytes")
        )
        if documents:
            say(f"{folder}: {split}: {documents:,} documents, {size:,} bytes of text, {tokens:,} tokens")
    bad = f"; {index.bad_lines:,} bad lines, in bad-lines.jsonl" if index.bad_lines else ""
    say(f"{folder}: vocabulary of {index.vocab_size:,}, {index.dtype}{bad}")

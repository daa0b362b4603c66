"""`canonlm convert`: a published checkpoint into our format, and back."""

from pathlib import Path
from typing import Annotated

import typer

from canonlm.cli import later
from canonlm.cli.options import NewFolder, check_new, save_model
from canonlm.cli.status import load_torch, say
from canonlm.core.errors import unknown

SOURCE = typer.Argument(
    help="A folder, or a repository on the Hugging Face Hub, with a published checkpoint or one of ours.",
    metavar="SOURCE",
)
VARIANT = typer.Option(help="Which sub-folder, if SOURCE has several.")
REVISION = typer.Option(help="Branch, tag or commit on the Hub.")
TOKEN = typer.Option(help="Access token for the Hub. Default: the one you logged in with.")
CACHE_DIR = typer.Option(help="Where downloads are kept. Default: the Hub's own cache.")
DTYPE = typer.Option(help="float32, bfloat16, float16 or float64. Default: as stored.")
TO = typer.Option(
    help="canonlm: ours, for from_pretrained. hf, lingua: the release's two formats. llama: transformers' own Llama."
)

DTYPES = ("bfloat16", "float16", "float32", "float64")


def convert(
    source: Annotated[str, SOURCE],
    out: NewFolder,
    variant: Annotated[str | None, VARIANT] = None,
    revision: Annotated[str | None, REVISION] = None,
    token: Annotated[str | None, TOKEN] = None,
    cache_dir: Annotated[Path | None, CACHE_DIR] = None,
    dtype: Annotated[str | None, DTYPE] = None,
    to: Annotated[str, TO] = "canonlm",
) -> int:
    """Read a published checkpoint and write it in another format.

    OUT is complete or absent.
    """
    check_new(out)
    if dtype is not None and dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)

    load_torch()
    if to not in later.published.TARGETS:
        raise unknown("target", to, later.published.TARGETS)
    later.transformers.utils.logging.disable_progress_bar()
    model = later.published.load_published(
        source, variant, revision=revision, token=token, cache_dir=cache_dir,
        dtype=None if dtype is None else getattr(later.torch, dtype),
    )  # fmt: skip
    save_model(out, lambda folder: later.published.save_published(model, folder, to))
    precision = str(model.dtype).removeprefix("torch.")
    say(f"{later.names.name_of(model.config)}, {model.num_parameters():,} parameters, {precision}: {out}")
    return 0

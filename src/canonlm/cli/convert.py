"""`canonlm convert`: a published checkpoint into our format, and back."""

from pathlib import Path
from typing import Annotated

import typer

from canonlm.cli.options import writing_model
from canonlm.cli.status import doing, load_torch, say

SOURCE = typer.Argument(
    help="A folder, or a repository on the Hugging Face Hub, with a published checkpoint or one of ours.",
    show_default=False,
    metavar="SOURCE",
)
OUT = typer.Argument(help="The folder to write.", show_default=False, metavar="OUT")
VARIANT = typer.Option(help="Which sub-folder, if SOURCE has several.", show_default=False)
REVISION = typer.Option(help="Branch, tag or commit on the Hub.", show_default=False)
TOKEN = typer.Option(help="Access token for the Hub. Default: the one you logged in with.", show_default=False)
CACHE_DIR = typer.Option(help="Where downloads are kept. Default: the Hub's own cache.", show_default=False)
DTYPE = typer.Option(help="float32, bfloat16, float16 or float64. Default: as stored.", show_default=False)
TO = typer.Option(
    help="canonlm: ours, for from_pretrained. hf, lingua: the release's two formats. llama: transformers' own Llama."
)

DTYPES = ("bfloat16", "float16", "float32", "float64")


def convert(
    source: Annotated[str, SOURCE],
    out: Annotated[Path, OUT],
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
    from canonlm.core.errors import expected, unknown

    if out.exists():
        raise expected("OUT", "a folder that does not exist yet", str(out))
    if dtype is not None and dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)

    load_torch()
    import torch
    from transformers.utils.logging import disable_progress_bar

    from canonlm.core.files import write_folder, write_manifest
    from canonlm.models.names import name_of
    from canonlm.models.published import TARGETS, load_published, save_published

    if to not in TARGETS:
        raise unknown("target", to, TARGETS)
    disable_progress_bar()
    model = load_published(
        source, variant, revision=revision, token=token, cache_dir=cache_dir,
        dtype=None if dtype is None else getattr(torch, dtype),
    )  # fmt: skip

    def fill(folder: Path) -> None:
        save_published(model, folder, to)
        write_manifest(folder)

    with doing("writing the model"), writing_model(out):
        write_folder(out, fill)
    precision = str(model.dtype).removeprefix("torch.")
    say(f"{name_of(model.config)}, {model.num_parameters():,} parameters, {precision}: {out}")
    return 0

"""`canonlm export`: write a run's model in the format of transformers."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from canonlm.cli.lazy import on_use
from canonlm.cli.options import NewFolder, TrustModel, writing_model
from canonlm.cli.status import doing, load_torch, say
from canonlm.core.errors import expected, unknown
from canonlm.core.files import write_folder, write_manifest

with on_use():
    import torch
    from transformers.utils import logging

    from canonlm.canonize import canonized_model
    from canonlm.suites import load_model
    from canonlm.train import checkpoint

RUN = typer.Argument(help="The folder of a run.", metavar="RUN")
STEP = typer.Option(help="Which checkpoint of the run, by its step. Default: the newest complete one.")
DTYPE = typer.Option(help="fp32, bf16 or fp16.")
SELF_CONTAINED = typer.Option(
    "--self-contained",
    help="Include the code: the folder then loads where canonlm is not installed (trust_remote_code=True).",
)

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def export(
    run: Annotated[Path, RUN],
    out: NewFolder,
    step: Annotated[int | None, STEP] = None,
    dtype: Annotated[str, DTYPE] = "fp32",
    self_contained: Annotated[bool, SELF_CONTAINED] = False,
    trust_remote_code: TrustModel = False,
) -> int:
    """Write the model of a run into a folder for `from_pretrained`: safetensors, and the tokenizer of its text.

    OUT is complete or absent.
    """
    if out.exists():
        raise expected("OUT", "a folder that does not exist yet", str(out))
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)

    load_torch()
    with doing("loading the model"):
        logging.disable_progress_bar()
        file, tokenizer = load_model.tokenizer_of_run(run), None
        loaded = checkpoint.load_model(run, step, trust_remote_code=trust_remote_code)
        model = loaded.module.to(getattr(torch, DTYPES[dtype]))
    kind = model.config.model_type
    if self_contained and kind != "canonlm" and not isinstance(model, canonized_model.CanonizedModel):
        raise ValueError(f"--self-contained only works with our decoder and with Canon layers, not with a plain {kind}")
    if file is not None:
        ids = model.config.bos_token_id, model.config.eos_token_id
        tokenizer = load_model.as_in_training(load_model.open_tokenizer(file), *ids)

    def fill(folder: Path) -> None:
        model.save_pretrained(folder, **({"self_contained": True} if self_contained else {}))
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        for weights in folder.glob("*.safetensors"):  # safetensors lets only their owner read them
            shutil.copymode(folder / "config.json", weights)
        write_manifest(folder)

    with doing("writing the model"), writing_model(out):
        write_folder(out, fill)
    say(f"{model.num_parameters():,} parameters, {DTYPES[dtype]}{', tokenizer' if tokenizer else ''}: {out}")
    return 0

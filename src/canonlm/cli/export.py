"""`canonlm export`: write a run's model in the format of transformers."""

from pathlib import Path
from typing import Annotated

import typer

from canonlm.cli import later
from canonlm.cli.options import NewFolder, SelfContained, TrustModel, check_new, save_model, with_defaults
from canonlm.cli.status import doing, load_torch, say
from canonlm.core.errors import unknown
from canonlm.core.files import CARD, write_bytes

RUN = typer.Argument(help="The folder of a run.", metavar="RUN")
STEP = typer.Option(help="Which checkpoint of the run, by its step. Default: the newest complete one.")
DTYPE = typer.Option(help="fp32, bf16 or fp16.")

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def export(
    run: Annotated[Path, RUN],
    out: NewFolder,
    step: Annotated[int | None, STEP] = None,
    dtype: Annotated[str, DTYPE] = "fp32",
    self_contained: SelfContained = False,
    trust_remote_code: TrustModel = False,
) -> int:
    """Write the model of a run into a folder for `from_pretrained`: safetensors, and the tokenizer of its text.

    README.md is a model card in the format of the Hugging Face Hub, which you may edit. OUT is complete or absent.
    """
    check_new(out)
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)

    load_torch()
    with doing("loading the model"):
        later.transformers.utils.logging.disable_progress_bar()
        file, tokenizer = later.load_model.tokenizer_of_run(run), None
        step = later.checkpoint.newest_step(run) if step is None else step
        loaded = later.checkpoint.load_model(run, step, trust_remote_code=trust_remote_code)
        model = loaded.module.to(getattr(later.torch, DTYPES[dtype]))
    kind = model.config.model_type
    if self_contained and kind != "canonlm" and not isinstance(model, later.canonized_model.CanonizedModel):
        raise ValueError(f"--self-contained only works with our decoder and with Canon layers, not with a plain {kind}")
    if file is not None:
        ids = model.config.bos_token_id, model.config.eos_token_id
        tokenizer = later.load_model.as_in_training(later.load_model.open_tokenizer(file), *ids)

    with_defaults(model, tokenizer)
    evaluated, _ = later.evaluated.load_evaluated(run / "evals" / f"step-{step:08d}")
    card = later.card.of_run(
        later.runs_load.load_run(run), step, out.absolute().name, parameters=model.num_parameters(),
        tokenizer=tokenizer is not None, code=self_contained, evaluated=evaluated,
    )  # fmt: skip

    def save(folder: Path) -> None:
        write_bytes(folder / CARD, card.encode(errors="replace"))  # names of files may not be text
        model.save_pretrained(folder, **({"self_contained": True} if self_contained else {}))
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    save_model(out, save)
    say(f"{model.num_parameters():,} parameters, {DTYPES[dtype]}{', tokenizer' if tokenizer else ''}: {out}")
    return 0

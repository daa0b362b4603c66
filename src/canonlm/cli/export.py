"""`canonlm export`: a run's model as transformers loads it."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from canonlm.models import CanonLMConfig

RUN = typer.Argument(help="The folder of a run.", show_default=False)
OUT = typer.Argument(help="The folder to make.", show_default=False)
STEP = typer.Option(help="Of which checkpoint. Default: the newest whole one.", show_default=False)
DTYPE = typer.Option(help="fp32 or bf16.")
SELF_CONTAINED = typer.Option(
    "--self-contained", help="With its code: loads where canonlm is not installed (trust_remote_code=True)."
)

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def export(
    run: Annotated[Path, RUN],
    out: Annotated[Path, OUT],
    step: Annotated[int | None, STEP] = None,
    dtype: Annotated[str, DTYPE] = "fp32",
    self_contained: Annotated[bool, SELF_CONTAINED] = False,
) -> int:
    """Write the model of a run into a folder for `from_pretrained`: safetensors, and the tokenizer of its text.

    OUT is whole or not there.
    """
    from canonlm.errors import expected, unknown

    if out.exists():
        raise expected("OUT", "a folder that does not exist yet", str(out))
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)

    import torch
    from transformers.utils.logging import disable_progress_bar

    from canonlm.train.checkpoint import load_model
    from canonlm.train.files import write_folder

    disable_progress_bar()
    model = load_model(run, step).to(getattr(torch, DTYPES[dtype]))
    tokenizer = _tokenizer(run)

    def fill(folder: Path) -> None:
        model.save_pretrained(folder, self_contained=self_contained)
        if tokenizer is not None:
            _as_in_training(tokenizer, model.config).save_pretrained(folder)
        for weights in folder.glob("*.safetensors"):  # written for their owner alone
            shutil.copymode(folder / "config.json", weights)

    try:
        write_folder(out, fill)
    except OSError as error:
        raise expected("OUT", f"a folder that can be written ({error.strerror})", str(out)) from None
    print(f"{model.num_parameters():,} parameters, {DTYPES[dtype]}{', tokenizer' if tokenizer else ''}: {out}")
    return 0


def _as_in_training(file: Path, config: "CanonLMConfig") -> "PreTrainedTokenizerFast":
    """With the special tokens of the model's training texts: what is encoded begins as they did."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer.from_file(str(file))
    ids = {"bos_token": config.bos_token_id, "eos_token": config.eos_token_id}
    names = {role: inner.id_to_token(id) for role, id in ids.items() if isinstance(id, int)}
    if bos := names.get("bos_token"):
        inner.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, config.bos_token_id)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def _tokenizer(run: Path) -> Path | None:
    """The tokenizer of the text that a run was trained on; None of a run on a task. All its texts have the same one."""
    from canonlm.train.folder import read_json

    files = [Path(text["folder"]) / "tokenizer.json" for text in (read_json(run / "data.json") or {}).values()]
    found = next(filter(Path.is_file, files), None)
    if files and found is None:
        print(f"canonlm: the tokenizer is left out: {files[0]} is not there", file=sys.stderr)
    return found

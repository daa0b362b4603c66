"""Options shared by several commands: those that open a saved model, and those that train one."""

import errno
import shutil
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer
from safetensors import SafetensorError

from canonlm.cli import completion, later
from canonlm.cli.status import doing, load_torch, say
from canonlm.core.errors import expected, writing
from canonlm.core.files import MANIFEST, write_folder, write_manifest, write_text

Recipe = Annotated[
    str,
    typer.Argument(
        help="A YAML file, or the name of a recipe (`canonlm recipes list`).",
        autocompletion=completion.recipes,
        metavar="RECIPE",
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to change, such as train.steps=100.", metavar="KEY=VALUE")
]
RunFolder = Annotated[Path | None, typer.Option("--out", help="The run's folder. Default: runs/RECIPE.")]
TrustRecipe = Annotated[
    bool,
    typer.Option(
        "--trust", help="Run the on_checkpoint command and the Python files that somebody else's recipe names."
    ),
]
Match = Annotated[
    str | None,
    typer.Option(
        help="parameters: resize each MLP until all architectures have as many parameters as the first, within 1 %; "
        "state: heads or key sizes until they have as many bytes of state, within 5 %; state,parameters: both."
    ),
]
SeedSet = Annotated[
    str,
    typer.Option(
        help="Which seeds: set 0 is that of our own runs; new: the first set without runs, to confirm a verdict.",
        metavar="N|new",
    ),
]
Jobs = Annotated[int, typer.Option(help="How many runs at a time.", min=1)]
SlurmWorkers = Annotated[bool, typer.Option("--slurm", help="Start workers as a SLURM job array instead of one here.")]
SlurmSettings = Annotated[
    list[str] | None,
    typer.Argument(
        help="With --slurm: the job's settings, such as array=16 gpus=1 time=24:00:00.", metavar="KEY=VALUE"
    ),
]
Model = Annotated[
    str,
    typer.Argument(
        help="A run's folder, a folder of `canonlm export` or of transformers, a published checkpoint, or a name on "
        "the Hugging Face Hub.",
        metavar="MODEL",
    ),
]
Step = Annotated[
    int | None, typer.Option(help="Which checkpoint of a run, by its step. Default: the newest complete one.")
]
Variant = Annotated[str | None, typer.Option(help="Which sub-folder, if a published checkpoint has several.")]
Tokenizer = Annotated[
    str | None, typer.Option(help="A file, a folder, a name on the Hub, or bytes. Default: the model's own.")
]
Dtype = Annotated[str | None, typer.Option(help="fp32, bf16 or fp16. Default: as stored.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, …")]
TrustModel = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
NewFolder = Annotated[Path, typer.Argument(help="The folder to write.", metavar="OUT")]
JsonFile = Annotated[
    str | None, typer.Option("--json", help="Write the same as JSON; - writes to the terminal instead.", metavar="FILE")
]


def started(raw: dict[str, Any], typed: Collection[str]) -> dict[str, Any]:
    """The settings of a recipe, completed by those of the model in `model.weights`: only these need torch."""
    model = raw.get("model")
    if not isinstance(model, dict) or model.get("weights") is None:
        return raw
    load_torch()
    return later.weights.completed(raw, typed)


def check_place(path: str | None, option: str) -> None:
    """Report a missing folder before the work, not after it."""
    if path is not None and path != "-" and not Path(path).parent.is_dir():
        raise expected(option, "a file in a folder that exists", path)


def write_to(path: str, text: str, option: str) -> None:
    """Write a text to the file that an option names; - is the terminal."""
    if path == "-":
        if sys.stdout is None:
            raise expected(option, "a file, or - with an open standard output", path)
        text.encode(sys.stdout.encoding)  # of data, no character may be replaced: UnicodeEncodeError
        sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
        return
    with writing(option, path, "file"):
        write_text(Path(path), text)
    say(f"written: {path}")


def check_new(out: Path) -> None:
    if out.exists():
        raise _exists(out)


def _exists(out: Path) -> ValueError:
    return expected("OUT", "a folder that does not exist yet", str(out))


Figures = Annotated[
    Path | None,
    typer.Option(help="Also write every chart of the page as SVG and PDF into this folder.", metavar="DIR"),
]
SelfContained = Annotated[
    bool,
    typer.Option(
        "--self-contained",
        help="Include the code: the folder then loads where canonlm is not installed (trust_remote_code=True).",
    ),
]


def with_defaults(model: Any, tokenizer: Any) -> None:
    """Set what generation reads from a folder: the padding token (the one that ends a text, if there is none) and the
    tokenizer's max length."""
    generation = getattr(model, "generation_config", None)
    if generation is not None and generation.pad_token_id is None:
        ends = generation.eos_token_id
        generation.pad_token_id = ends[0] if isinstance(ends, list) and ends else ends
    if tokenizer is not None:
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if tokenizer.model_max_length > 10**12 and isinstance(length, int):  # the library's number for no limit
            tokenizer.model_max_length = length


def save_model(out: Path, save: Callable[[Path], object]) -> None:
    """Write the folder OUT, which is complete or absent, with what `save` writes into it, and its manifest."""

    def fill(folder: Path) -> None:
        try:
            save(folder)
        except SafetensorError as error:  # for a full disk
            raise OSError(errno.EIO, str(error)) from None
        write_manifest(folder)
        for weights in folder.glob("*.safetensors"):  # safetensors lets only their owner read them
            shutil.copymode(folder / MANIFEST, weights)

    with doing("writing the model"), writing("OUT", out):
        try:
            write_folder(out, fill)
        except FileExistsError:  # another process has made it meanwhile
            raise _exists(out) from None


def opened(model: str, **options: Any) -> "later.load_model.Subject":
    """Open the saved model of a command, from the options above, without the library's progress bars."""
    load_torch()
    later.transformers.utils.logging.disable_progress_bar()
    with doing("loading the model"):
        return later.load_model.open_model(model, **options)


def parts_of(option: str, text: str | None) -> list[str]:
    """`a, b` → ["a", "b"]; nothing without the option. ValueError: an empty part."""
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    if not all(parts):
        raise expected(option, "names separated by commas", text)
    return parts


def seed_set_of(text: str, out: Path, *folders: Path) -> int:
    """See `canonlm.experiments.replicate.seed_set_of`; prints which set is new."""
    number = later.replicate.seed_set_of(text, out, *folders)
    if text == "new":
        say(f"seed set {number}, which has no runs yet; --seed-set {number} continues it")
    return number

"""`canonlm check`: whether a model gives the same answers with a cache, in batches, with padding and so on."""

import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from json import dumps
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from canonlm.cli import later
from canonlm.cli.options import (
    Device,
    Dtype,
    JsonFile,
    Step,
    TrustModel,
    Variant,
    check_place,
    opened,
    parts_of,
    write_to,
)
from canonlm.cli.status import doing, load_torch, wide_console
from canonlm.core.errors import brief, unknown
from canonlm.core.user_folders import expanded

MODEL = typer.Argument(
    help="A run's folder, a saved or published model, a name on the Hugging Face Hub; or an architecture, such as "
    "llama+canon or hf:qwen3, which is made small, with random weights.",
    metavar="MODEL",
)
CASES = typer.Option(help='Which cases, separated by commas, such as "greedy,left padding". Default: all.')
SEED = typer.Option(help="Seed of the tokens that the model reads, and of random weights.", min=0)

MARKS = {"passed": "green", "differs": "bold red", "failed": "bold red", "refused": "yellow"}


def check(
    model: Annotated[str, MODEL],
    cases: Annotated[str | None, CASES] = None,
    seed: Annotated[int, SEED] = 0,
    json: JsonFile = None,
    step: Step = None,
    variant: Variant = None,
    dtype: Dtype = None,
    device: Device = "auto",
    trust_remote_code: TrustModel = False,
) -> int:
    """Check that a model gives the same answers with a cache, in a batch, padded, in pieces, with beams, packed, saved.

    Each case is compared with plain forward passes over single rows. `differs` is a wrong answer without an error,
    `failed` an error in the model's code; both end with exit code 1. `refused` means that canonlm or the library does
    not support the use; a model that refuses most cases is not checked, which ends with exit code 1, too.
    """
    load_torch()
    check_place(json, "--json")
    chosen = parts_of("--cases", cases) or None
    for name in chosen or []:
        if name not in later.check.CASES:
            raise unknown("case", name, later.check.CASES)
    if _is_architecture(model):
        for option, value in (("--step", step), ("--variant", variant)):
            if value is not None:
                raise ValueError(f"{option} only works with a saved model, and {brief(model)} is an architecture")
        subject = _random(model, seed, dtype, device)
    else:
        subject = opened(
            model, step=step, variant=variant, dtype=dtype, device=device, trust_remote_code=trust_remote_code
        ).model
    what = f"running {len(chosen or later.check.CASES)} cases"
    with later.saved_model.quiet(), doing(what), redirect_stdout(sys.stderr):  # the prints of the model's code
        outcomes = later.check.decoding(subject, chosen, seed=seed)
    wrong = later.check.complaints(outcomes)
    if json != "-":
        table = Table("case", "", "error", "", box=None, padding=(0, 2, 0, 0))
        for outcome in outcomes:
            error = "" if outcome.error is None else f"{outcome.error:.1e}"
            what = later.check.CASES[outcome.case].about if error else outcome.detail
            table.add_row(outcome.case, f"[{MARKS[outcome.state]}]{outcome.state}[/]", error, Text(what))
        wide_console().print(table)
        print(f"{model}: {'; '.join(wrong) or 'no wrong answer'}")
    if json is not None:
        write_to(json, dumps([asdict(outcome) for outcome in outcomes], indent=1), "--json")
    return 1 if wrong else 0


def _is_architecture(name: str) -> bool:
    """Whether `name` is an architecture, not a folder or a name on the Hub. Hub names have none of these signs."""
    if expanded(name).is_dir():
        return False
    signs = name.partition(":")[0] in ("hf", "fla") or ".py" in name or "+" in name or "{" in name
    return signs or name.partition(".")[0].removesuffix("-conv") in later.names.bases()


def _random(arch: str, seed: int, dtype: str | None, device: str) -> "later.transformers.PreTrainedModel":
    later.transformers.utils.logging.disable_progress_bar()
    precision, place = later.load_model.dtype_and_device(dtype, device)
    model: Any = later.models_build.build(arch, later.interface.SMALL, seed).module
    return model.to(device=place, dtype=precision).eval()

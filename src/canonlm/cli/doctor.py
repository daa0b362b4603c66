"""`canonlm doctor`: what is installed on this machine, and which of its kernels are right."""

from json import dumps
from operator import itemgetter
from typing import Annotated, Any

import typer
from rich.table import Table

from canonlm.cli import later
from canonlm.cli.options import JsonFile, check_place, write_to
from canonlm.cli.status import doing, wide_console

AGAIN = typer.Option("--again", help="Test every kernel again, even if its outcome is recorded for these versions.")


def doctor(again: Annotated[bool, AGAIN] = False, json: JsonFile = None) -> int:
    """Show what is installed here, and whether every kernel that models would use is correct.

    Each kernel is compared with its definition on small random inputs: values and gradients, packed documents, decays
    near zero. Outcomes are recorded for these versions and this device. Exit code 1: a kernel that would be used is
    wrong or could not be tried (training then uses the slower form and says so).
    """
    check_place(json, "--json")
    with doing("loading torch"):
        device = later.torch.device("cuda" if later.torch.cuda.is_available() else "cpu")
    machine = {**later.machine.environment(device), **later.selftest.versions()}
    with doing("trying kernels"):
        rows = [row for _, row in sorted(later.registry.trials(device, again=again), key=itemgetter(0))]
    notes = _notes(machine, device.type)
    bad = {
        what: ", ".join(f"{row['kernel']} ({row['dtype']})" for row in rows if row["state"] == state)
        for state, what in (("wrong", "wrong on this machine"), ("not tried", "could not be tried on this machine"))
    }
    bad = {what: kernels for what, kernels in bad.items() if kernels}
    if json != "-":
        _show(machine, rows, notes)
        for what, kernels in bad.items():
            print(f"{what}: {kernels}")
        if not bad:
            print("everything that would be used is right")
    if json is not None:
        write_to(json, dumps({"machine": machine, "kernels": rows, "notes": notes}, indent=1), "--json")
    return 1 if bad else 0


def _show(machine: dict[str, Any], rows: list[dict[str, Any]], notes: list[str]) -> None:
    console = wide_console()
    for name, value in machine.items():
        console.print(f"{name:24}{value}", highlight=False, markup=False)
    table = Table("kernel", "used for", "inputs", "", "values", "gradients", "", box=None, padding=(0, 2, 0, 0))
    marks = {"right": "green", "wrong": "bold red", "missing": "yellow", "not tried": "bold red"}
    for row in rows:
        errors = [f"{row[key]:.1e}" if key in row else "" for key in ("values", "gradients")]
        state = f"[{marks[row['state']]}]{row['state']}[/]"
        table.add_row(row["kernel"], row["used_for"], row["dtype"], state, *errors, row["detail"])
    console.print()
    console.print(table)
    for note in notes:
        console.print(f"- {note}", highlight=False, markup=False)


def _notes(machine: dict[str, Any], kind: str) -> list[str]:
    """What a user of this machine should know."""
    notes = []
    if kind != "cuda":
        notes.append("No GPU: Canon layers use numba kernels, recurrences PyTorch. bfloat16 products may be emulated.")
        if "flash-linear-attention" in machine or "triton" in machine:
            what = "triton or flash-linear-attention is installed without a GPU"
            notes.append(f"{what}: linear models of transformers may fail. Remove them: pip uninstall triton fla-core")
    elif "triton" not in machine:
        notes.append("triton is missing: flash-linear-attention and torch.compile need it for their kernels.")
    return notes

"""`canonlm tasks` and `canonlm archs`: lists of the tasks and architectures."""

from typing import Any

from rich.console import Console
from rich.table import Table

from canonlm.cli import later
from canonlm.cli.status import load_torch

LAYER: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "vocab_size": 64,
    "seq_len": 64,
}
"""The sizes of the models whose state is listed."""


def tasks() -> None:
    """List the tasks: what each asks, and its difficulties."""
    table = Table("task", "what it asks", "difficulties (paper preset)", box=None, padding=(0, 2, 0, 0))
    for name in later.tasks.names():
        task = later.tasks.find(name)
        table.add_row(name, task.about, ", ".join(task.difficulties) or "one")
    console = Console()
    console.print(table)
    console.print(
        f"\nPresets: {', '.join(later.recipes.presets())}. Run one: canonlm play depo --preset tiny", highlight=False
    )
    of_peers = ", ".join(f"{task} --preset {name}" for name, task in later.recipes.peers_presets().items())
    console.print(f"Settings of other papers: {of_peers}", highlight=False)
    console.print(
        "See samples: canonlm data show depo --n 2. A task of yours: canonlm play mine.py:Name", highlight=False
    )


def archs() -> None:
    """List the architectures and what can be added to them."""
    load_torch()
    table = Table("name", "state of a layer", "what it is", box=None, padding=(0, 2, 0, 0))
    for name, (_, architecture) in later.names.bases().items():
        table.add_row(name, _state(name), architecture.about)
    for name, modifier in later.names.MODIFIERS.items():
        table.add_row(f"+{name}", "", modifier.about)
    console = Console()
    console.print(table)
    for examples in (
        f"\nState: what a layer of width {LAYER['hidden_size']} keeps of a sequence, in float32; a model: canonlm plan",
        "\nCombined: llama+canon, gla5+canon, llama-nope+canon=AC, llama+canon+rope=0.25",
        "Without the short convolutions: gla5-conv. Alternating layers: gdn2.gdn2.gdn2.llama",
        "Any setting, in braces: gla5{num_heads=4}+canon, llama{num_key_value_heads=2}",
        "Models of transformers: hf:qwen3, hf:lfm2{conv_bias=true}; of flash-linear-attention: fla:kda",
        "From a file of yours, a mixer or a whole model: mine.py:MyBlock",
    ):
        console.print(examples, highlight=False)


def _state(arch: str) -> str:
    with later.torch.device("meta"):
        state = later.models_build.build(arch, later.interface.Sizes(**LAYER)).state(LAYER["seq_len"])
    if state is None:
        return "–"
    return " + ".join(
        later.errors.readable(size) + what
        for size, what in ((state.fixed, ""), (state.per_token, " per token"))
        if size
    )

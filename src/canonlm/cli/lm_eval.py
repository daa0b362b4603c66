"""`canonlm lm-eval`: the command line of EleutherAI's lm-evaluation-harness, with our models and tasks in it."""

from typing import Annotated

import typer

from canonlm.cli import later
from canonlm.cli.status import load_torch
from canonlm.suites.harness import TASKS, require

CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]}
TASKS_FOLDER = typer.Option(
    "--tasks-folder", help="Print the folder of our groups and tasks, for the harness's own `--include_path`."
)


def lm_eval(context: typer.Context, tasks_folder: Annotated[bool, TASKS_FOLDER] = False) -> int:
    """The lm-evaluation-harness with our models: `canonlm lm-eval --model canonlm --model_args
    pretrained=runs/mine,bos=true --tasks canonlm_standard --batch_size auto`.

    `pretrained` takes what `canonlm eval` opens: a run, an exported folder, a published checkpoint, any causal language
    model of transformers; with `step=`, `variant=`, `tokenizer=`, `dtype=`, `max_length=`, and `bos=true` to begin
    texts with a BOS token. All other arguments are the harness's: `canonlm lm-eval run -h` explains them, `canonlm
    lm-eval ls groups` lists groups of tasks; `--model hf` and the rest of its models work, too.
    """
    if tasks_folder:
        print(TASKS)
        return 0
    require()
    load_torch()
    later.harness_command.run(context.args)
    return 0

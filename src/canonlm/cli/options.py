"""Options that every command has which opens a saved model."""

import typer

MODEL = typer.Argument(
    help="A run's folder, a folder of `canonlm export` or of transformers, a published checkpoint, or a name on the "
    "Hugging Face Hub.",
    show_default=False,
)
STEP = typer.Option(help="Which checkpoint of a run. Default: the newest whole one.", show_default=False)
VARIANT = typer.Option(help="Which sub-folder, where a published checkpoint has several.", show_default=False)
TOKENIZER = typer.Option(
    help="A file, a folder, a name on the Hub, or bytes. Default: the model's own.", show_default=False
)
DTYPE = typer.Option(help="fp32, bf16 or fp16. Default: as stored.", show_default=False)
DEVICE = typer.Option(help="auto, cpu, cuda, …")
TRUST = typer.Option("--trust-remote-code", help="Run code that comes with the model.")

"""`canonlm canonize`: put Canon layers into a saved decoder that has none."""

from pathlib import Path
from typing import Annotated, Any

import typer

import canonlm
from canonlm.cli import later
from canonlm.cli.options import Dtype, SelfContained, TrustModel, check_new, opened, save_model, with_defaults
from canonlm.cli.status import load_torch, say
from canonlm.core.errors import InvalidSetting, brief, expected
from canonlm.core.files import CARD, write_bytes
from canonlm.core.user_folders import expanded

MODEL = typer.Argument(
    help="A folder of transformers, or a name on the Hugging Face Hub; with --dry-run also an architecture, such as "
    "hf:qwen3.",
    metavar="MODEL",
)
OUT = typer.Argument(help="The folder to write.", metavar="OUT")
SITES = typer.Option(help="Sites: letters such as ABCD, with variants such as KVOM:scaled.")
INIT = typer.Option(
    help="zero: layers start as the identity where their variant allows it, so the model answers as before; uniform: "
    "random taps, as in the paper."
)
SEED = typer.Option(help="Seed of random taps.", min=0)
DRY_RUN = typer.Option("--dry-run", help="Only print which layers each block would get; no weights are read.")


def canonize(
    model: Annotated[str, MODEL],
    out: Annotated[Path | None, OUT] = None,
    sites: Annotated[str, SITES] = "ABCD",
    init: Annotated[str, INIT] = "zero",
    seed: Annotated[int, SEED] = 0,
    dry_run: Annotated[bool, DRY_RUN] = False,
    dtype: Dtype = None,
    self_contained: SelfContained = False,
    trust_remote_code: TrustModel = False,
) -> int:
    """Put Canon layers into a causal language model of transformers, and save it.

    Once canonlm is imported, OUT loads with AutoModelForCausalLM, and trains and generates as the model did before.
    """
    load_torch()
    later.load_model.dtype_and_device(dtype, "cpu")
    path = expanded(model)
    if (path / "config.yaml").is_file():
        expectation = "a transformers folder (for a run: train an architecture with +canon, or canonlm export it first)"
        raise expected("MODEL", expectation, model)
    if dry_run:
        if out is not None:
            raise ValueError("OUT cannot be used with --dry-run, which writes nothing")
        host = _on_meta(model, trust_remote_code)
        say(listing(canonlm.describe(host, sites, init=init)))
        if model.startswith("hf:"):
            sizes = f"{later.interface.SMALL.num_hidden_layers} layers of width {later.interface.SMALL.hidden_size}"
            say(f"Sizes are made up: {model} is a type of model, built here with {sizes}.")
        return 0
    if model.startswith("hf:"):
        raise ValueError(
            f"MODEL: {brief(model)} is an architecture, which only works with --dry-run; a saved model is needed"
        )
    if out is None:
        raise ValueError("OUT is missing: the folder to write (or --dry-run)")
    check_new(out)

    subject = opened(model, dtype=dtype, device="cpu", trust_remote_code=trust_remote_code)
    later.torch.manual_seed(seed)
    places = canonlm.describe(subject.model, sites, init=init)
    canonized = canonlm.canonize(subject.model, sites, init=init)

    added = sum(p.numel() for name, p in canonized.named_parameters() if ".canon_" in name)
    with_defaults(canonized, subject.tokenizer)
    card = later.card.of_canonized(
        out.absolute().name, model, sites, parameters=canonized.num_parameters(), added=added,
        tokenizer=subject.tokenizer is not None, code=self_contained,
    )  # fmt: skip

    def save(folder: Path) -> None:
        write_bytes(folder / CARD, card.encode(errors="replace"))  # names of files may not be text
        options: dict[str, Any] = {"self_contained": True} if self_contained else {}
        canonized.save_pretrained(folder, **options)
        if subject.tokenizer is not None:
            subject.tokenizer.save_pretrained(folder)

    save_model(out, save)
    say(f"{len(places)} Canon layers, {added:,} parameters of {canonized.num_parameters():,}: {out}")
    return 0


def listing(places: "list[later.placement.Place]") -> str:
    """The layers as text: one paragraph for all blocks that get the same ones."""
    rows: dict[str, list[str]] = {}
    for place in places:
        rows.setdefault(place.block, []).append(str(place))
    blocks_by_text: dict[str, list[str]] = {}
    for block, lines in rows.items():
        blocks_by_text.setdefault("\n".join(f"  {line}" for line in lines), []).append(block)
    paragraphs = [f"{_block_range(blocks)}\n{text}" for text, blocks in blocks_by_text.items()]
    return "\n".join([*paragraphs, f"{len(places)} Canon layers in {len(rows)} blocks"])


def _block_range(blocks: list[str]) -> str:
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]} and {len(blocks) - 1} more, up to {blocks[-1]}"


def _on_meta(model: str, trust_remote_code: bool) -> "later.transformers.PreTrainedModel":
    """The model on the meta device, without weights."""
    made_up = later.hf_small_configs.causal_config(model, later.interface.SMALL) if model.startswith("hf:") else None
    try:
        if made_up is not None:
            with later.torch.device("meta"), later.limits.few_modules():
                return made_up[0]._from_config(made_up[1], dtype=later.torch.float32)
        path = expanded(model)
        if path.is_dir():
            later.saved.read_settings(path)
        offline = path.is_dir() or not later.load_model.hub_is_known()
        config = later.transformers.AutoConfig.from_pretrained(
            path if path.is_dir() else model, trust_remote_code=trust_remote_code, local_files_only=offline
        )
        later.saved.check_references(f"{model}: config.json", config.to_dict())
        with later.torch.device("meta"), later.limits.few_modules():
            return later.transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except InvalidSetting:
        raise
    except Exception as error:  # a model's own code may raise anything
        text = brief(" ".join(str(error).split()))
        raise InvalidSetting("MODEL", f"MODEL: {brief(model)} cannot be built: {text}") from None

"""Saved models as transformers models: folders of `save_pretrained`, canonized ones, and published checkpoints."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as library_logging

from canonlm.core.errors import brief, expected
from canonlm.core.files import check_manifest
from canonlm.core.saved import cannot_be_loaded, check_fits, check_loaded, check_references, read_settings
from canonlm.core.untrusted import read_object
from canonlm.core.user_code import reference_of
from canonlm.models.mixers import MIXERS
from canonlm.models.published import load_published
from canonlm.models.published.checkpoint import RELEASES
from canonlm.models.published.files import has_config, variants_in


def saved_model(
    source: str,
    root: Path,
    variant: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, str]:
    """A saved model on the CPU, and its kind: canonlm, published or transformers.

    source: a folder, or a name on the Hub whose small files are in `root`. ValueError in one line: a folder without a
    model, damaged weights or weights that do not fit the configuration.
    """
    kind = kind_of(source, root, variant)
    if kind == "published":
        return load_published(source, variant, dtype=dtype), kind
    config = read_object(root / "config.json")
    names = mixers if isinstance(mixers := config.get("mixers"), list) else [config.get("arch")]
    if outside := [name for name in names if isinstance(name, str) and reference_of(name) and name not in MIXERS]:
        what = f"the folder does not have {brief(outside[0])}, a program in a file"
        raise ValueError(f"{source}: {what}: open the run in place of it, with --trust-remote-code")
    if config.get("auto_map") and config.get("model_type") not in CONFIG_MAPPING and not trust_remote_code:
        raise ValueError(f"{source}: it comes with code of its own, which runs only with --trust-remote-code")
    model = _from_pretrained(source, dtype, trust_remote_code)
    return model, "canonlm" if model.config.model_type == "canonlm" else "transformers"


def kind_of(source: str, root: Path, variant: str | None = None) -> str:
    """published, or transformers, which includes our own. ValueError for a folder without a model."""
    config = read_object(root / "config.json") if (root / "config.json").exists() else None
    check_references(str(root / "config.json"), config or {})
    if config is not None and not isinstance(model_type := config.get("model_type", ""), str):
        raise expected(f"{root / 'config.json'}: model_type", "a string", model_type)
    if not has_config(root) and not variants_in(root):
        raise _no_model(source, root)
    is_published = variant is not None or config is None or config.get("model_type") in RELEASES
    return "published" if is_published else "transformers"


def _from_pretrained(name: str, dtype: torch.dtype | None, trust_remote_code: bool) -> PreTrainedModel:
    folder = Path(name)
    if folder.is_dir():
        _check_folder(folder, trust_remote_code)
    try:
        with quiet():
            opened: Any = AutoModelForCausalLM.from_pretrained(
                name,
                dtype=dtype or "auto",
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they can be named
            )
            model, info = opened
    except Exception as error:  # a model's own code may raise anything
        raise cannot_be_loaded(name, error) from None
    check_loaded(name, model, info)
    return model


def _check_folder(folder: Path, trust_remote_code: bool) -> None:
    """ValueError for a saved model of transformers whose configuration does not fit its weights, or needs more memory
    than there is, and for files that lead out of its folder."""
    check_manifest(folder)
    config = read_settings(folder)

    def build() -> PreTrainedModel:
        with quiet():
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(folder)))

    own_code = trust_remote_code and config.get("auto_map")
    # A canonized model's settings are its host's, one level down.
    canonized = config.get("model_type") == "canon_host" and isinstance(config.get("host"), dict)
    check_fits(folder, config["host"] if canonized else config, None if own_code else build)


def _no_model(source: str, folder: Path) -> ValueError:
    """The error for a folder that is not a model; it names a model nearby, if there is one."""
    names = sorted(file.name for file in folder.iterdir() if not file.name.startswith("."))
    what = "a run (config.yaml), a saved model (config.json) or a published checkpoint (params.json)"
    run = next((parent for parent in folder.resolve().parents if (parent / "config.yaml").is_file()), None)
    if match := re.fullmatch(r"step-(\d+)", folder.resolve().name):
        what = f"the folder of the run, with --step {int(match[1])}"
    elif run is not None:
        what = f"the folder of the run, {run}"
    elif runs := sorted(file.parent for file in folder.glob("*/*/config.yaml")):
        what = f"one run, such as {runs[0]}"
    shown = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
    return ValueError(f"{expected('MODEL', what, source)}, a folder with {shown or 'nothing in it'}")


@contextmanager
def quiet() -> Iterator[None]:
    """Turns off the library's progress bars and loading reports: what matters in them is raised as an error."""
    verbosity, bars = library_logging.get_verbosity(), library_logging.is_progress_bar_enabled()
    library_logging.set_verbosity_error()
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        library_logging.set_verbosity(verbosity)
        if bars:
            library_logging.enable_progress_bar()

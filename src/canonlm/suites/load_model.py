"""Opens models for evaluation: runs of ours, saved and published checkpoints, any causal language model of
transformers."""

import hashlib
import json
import logging
import re
import socket
import zlib
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import huggingface_hub
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from canonlm.core import user_code
from canonlm.core.errors import InvalidSetting, Panic, brief, expected, panics_raised, unknown
from canonlm.core.files import Stamp
from canonlm.core.saved import reason_of
from canonlm.core.untrusted import check_tokenizer, path_inside, read_object, read_text
from canonlm.core.user_folders import expanded
from canonlm.data.tokenizers import load as load_tokenizer
from canonlm.models.build import wrap
from canonlm.models.config import OF_EXPERTS
from canonlm.models.published.files import variants_in
from canonlm.models.saved_model import quiet, saved_model
from canonlm.runs.folder import check_files, checkpoint_steps
from canonlm.train.build import pick_device
from canonlm.train.checkpoint import load_model
from canonlm.train.config import RunConfig
from canonlm.train.load_config import data_of_task
from canonlm.train.load_config import load as load_config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
_SMALL = ["*.json", "*.txt", "*.model", "*.jinja", "*.py"]
"""Files that are fetched from the Hub first, to check the model: everything but weights."""

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_SAMPLES = 64  # numbers of every tensor that a fingerprint reads
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Subject:
    """A model in evaluation mode on its device, and its tokenizer, if it has one.

    about: for display and for `results.json`: `source`, `kind` (run, canonlm, published or transformers), `step` (of a
    run), `arch`, `parameters`, `dtype`, `tokenizer` (sha256 of its vocabulary, shortened, or None), `fingerprint` (of
    the configuration and of some numbers of every tensor), `checksum` (of all numbers, and of the rest of the
    tokenizer; results of earlier versions have none). trusted: code that came with the model may run. run: the
    configuration of a run of ours.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    about: dict[str, Any]
    trusted: bool = False
    run: RunConfig | None = None


def open_model(
    source: str,
    *,
    step: int | None = None,
    variant: str | None = None,
    tokenizer: str | None = None,
    dtype: str | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
) -> Subject:
    """Open a model for evaluation.

    Args:
        source: the folder of a run, of `canonlm export` or `save_pretrained`, of a published checkpoint; or a name on
            the Hugging Face Hub.
        step: the step of a run's checkpoint; default: the newest complete one.
        variant: the sub-folder of a published checkpoint that has several.
        tokenizer: `bytes`, a tokenizer file, a folder with one, a name on the Hub; default: the model's own, if any.
        dtype: fp32, bf16 or fp16; default: as stored (runs: fp32).
        device: auto, cpu, cuda, …
        trust_remote_code: run code that comes with the model, or that a run keeps a copy of.

    ValueError in one line: no such model, a folder without a model, damaged weights or weights that do not fit the
    configuration, a tokenizer with more tokens than the model's vocabulary.
    """
    precision, place = dtype_and_device(dtype, device)
    path = expanded(source)
    if (path / "config.yaml").is_file():
        if variant is not None:
            what = f"--variant only works with a published checkpoint, and {brief(source)} is the folder of a run"
            raise InvalidSetting("--variant", what)
        with user_code.of_run(path, trust_remote_code):
            model, own, about, run = _of_run(path, step)
    else:
        if step is not None:
            what = f"--step only works with the folder of a run, and {brief(source)} has no config.yaml"
            raise InvalidSetting("--step", what)
        model, own, about = _of_files(source, variant, precision, trust_remote_code)
        run = None
    if precision is not None:
        model = model.to(precision)  # type: ignore[arg-type]  # the library's wrapper confuses the checker
    words = own if tokenizer is None else _named_tokenizer(tokenizer, trust_remote_code)
    if words is not None:
        words.opened_from = _file_of(tokenizer or source)  # for errors
    embedding: Any = model.get_input_embeddings().weight
    if words is not None and (tokens := max(words.get_vocab().values()) + 1) > (known := len(embedding)):
        what = f"one of at most {known:,} tokens, the vocabulary size of {source}"
        raise expected("--tokenizer", what, f"{tokenizer or 'its own'}, of {tokens:,}")
    about = {
        "source": source,
        **about,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "tokenizer": words and _sha256(json.dumps(sorted(words.get_vocab().items(), key=lambda item: item[1]))),
        "fingerprint": fingerprint(model),
        "checksum": checksum(model, words),
    }
    return Subject(model.to(place).eval(), words, about, trust_remote_code, run)  # type: ignore[arg-type]


def dtype_and_device(dtype: str | None, device: str) -> tuple[torch.dtype | None, str]:
    """The torch dtype (None: as stored) and the device for these options of `open_model`. ValueError for an unknown
    dtype, or a device that torch does not see."""
    if dtype is not None and dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    try:
        return None if dtype is None else DTYPES[dtype], pick_device(device)
    except ValueError:
        raise expected("--device", "auto, cpu or a device that torch sees here", device) from None


def fingerprint(model: PreTrainedModel) -> str:
    """Identifies weights and configuration. Reads some numbers of every tensor: training changes them all."""
    config = {
        key: value
        for key, value in model.config.to_dict().items()
        if not key.startswith(("_", "transformers", "published"))
    }
    if config["model_type"] == "canonlm":
        config = {**OF_EXPERTS, **config}  # as in earlier versions, where models without experts had these fields, too
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().flatten()
        some = flat[:: max(1, len(flat) // _SAMPLES)]
        digest.update(some.double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def checksum(model: PreTrainedModel, words: PreTrainedTokenizerBase | None) -> str:
    """Identifies all numbers of the weights, what the tokenizer does with a text, and the tokens that end one."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(f"{zlib.crc32(data.numpy())} ".encode())  # SHA-256 of large weights takes long
    settings: Any = model.generation_config
    how: Any = getattr(words, "backend_tokenizer", None)
    ends = [words and (words.bos_token_id, words.eos_token_id), settings and settings.eos_token_id]
    digest.update(f"{ends} {how and how.to_str()}".encode())
    return digest.hexdigest()[:16]


def tokenizer_of_run(run: Path) -> Path | None:
    """The tokenizer.json of a run's training texts, which all have the same one. None for a run on a task, and, with a
    warning, if the text has been moved away or prepared again since."""
    path = run / "data.json"
    texts = list(read_object(path).values()) if path.exists() else []
    if not all(
        isinstance(text, dict) and {str} == {type(text.get(key)) for key in ("folder", "sha256")} for text in texts
    ):
        raise ValueError(f"{path}: expected a folder and a sha256 for each text")
    files = [Path(text["folder"]) / "tokenizer.json" for text in texts]
    for file, text in zip(files, texts, strict=True):
        index = file.with_name(
            "index.json"
        )  # has the tokenizer's sha256: somebody else's run may name any of your folders
        if file.is_file() and index.is_file() and Stamp.of(index).sha256 == text["sha256"]:
            return file
    if files:
        _log.warning("the run's tokenizer is no longer there: %s", files[0])
    return None


def open_tokenizer(file: Path) -> Tokenizer:
    """Read a tokenizer.json. ValueError: it is not one."""
    try:
        with panics_raised(file):
            return Tokenizer.from_str(read_text(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file}: not a tokenizer ({reason_of(error)})") from None


def as_in_training(tokenizer: Tokenizer, bos_id: object, eos_id: object) -> PreTrainedTokenizerFast:
    """The tokenizer for transformers, with the special tokens of training: texts begin as they did in training."""
    ids = {"bos_token": bos_id, "eos_token": eos_id}
    names = {role: tokenizer.id_to_token(id) for role, id in ids.items() if isinstance(id, int)}
    if bos := names.get("bos_token"):
        tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


Opened = tuple[PreTrainedModel, PreTrainedTokenizerBase | None, dict[str, Any]]


def _of_run(path: Path, step: int | None) -> tuple[*Opened, RunConfig]:
    run = load_config(path / "config.yaml")
    check_files(path, data_of_task(run))
    if not (saved_steps := checkpoint_steps(path_inside(path, "checkpoints"))):
        raise expected("MODEL", "the folder of a run that has saved a checkpoint", str(path))
    file, words = tokenizer_of_run(path), None
    model, skipped = None, []
    for each in reversed(saved_steps) if step is None else [step]:
        try:
            model, step = load_model(path, each, config=run).module, each
            break
        except ValueError as error:
            skipped.append(str(error))
    if model is None:
        raise ValueError("; ".join(skipped))
    for line in skipped:
        _log.warning("damaged checkpoint skipped, step %d is used: %s", step, line)
    if file is not None:
        words = as_in_training(open_tokenizer(file), model.config.bos_token_id, model.config.eos_token_id)
    return model, words, {"kind": "run", "step": step, "arch": run.arch}, run


def _of_files(source: str, variant: str | None, dtype: torch.dtype | None, trust_remote_code: bool) -> Opened:
    path = expanded(source)
    if path.is_file():
        raise expected("MODEL", "a folder, and not a file in it", source)
    root = path if path.is_dir() else _fetch("MODEL", source)
    name = str(path) if path.is_dir() else source
    model, kind = saved_model(name, root, variant, dtype=dtype, trust_remote_code=trust_remote_code)
    places = [root]
    if kind == "published":
        places = [root / variant, root] if variant is not None else [root, *variants_in(root)]
    own = next(filter(None, (_saved_tokenizer(place, trust_remote_code) for place in places)), None)
    return model, own, {"kind": kind, "arch": wrap(model).arch}


def _named_tokenizer(name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    path = expanded(name)
    if name == "bytes" or path.is_file():
        return as_in_training(*load_tokenizer(name if name == "bytes" else path))
    folder = path if path.is_dir() else _fetch("--tokenizer", name)
    if (tokenizer := _saved_tokenizer(folder, trust_remote_code)) is None:
        raise expected("--tokenizer", f"a tokenizer ({', '.join(_TOKENIZERS[:2])}, …)", name)
    return tokenizer


def _saved_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """None: the folder has no tokenizer. ValueError: it has one that cannot be read."""
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return None
    check_tokenizer(folder)
    try:
        with quiet(), panics_raised(_file_of(folder)):
            words = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
            words("a")  # some settings are only read at the first use
            return words
    except Panic:
        raise
    except Exception as error:  # the library may not know the folder's model, or the file is damaged
        try:
            return as_in_training(*load_tokenizer(folder))
        except ValueError:
            raise ValueError(f"{folder}: its tokenizer cannot be read ({reason_of(error)})") from None


def _file_of(place: str | Path) -> str:
    file = Path(place) / "tokenizer.json"
    return str(file if file.is_file() else place)


def hub_is_known() -> bool:
    """Whether the Hub's host name resolves. If it does not, its client would retry for 10 to 30 seconds."""
    if getproxies():
        return True  # then a proxy resolves names
    try:
        socket.getaddrinfo(urlsplit(huggingface_hub.constants.ENDPOINT).hostname, None)
    except OSError:
        return False
    return True


def _fetch(key: str, name: str) -> Path:
    """The local folder with the small files of a repository on the Hub."""
    reason = ""
    if _HUB_NAME.fullmatch(name):
        offline = not hub_is_known()
        try:
            return Path(huggingface_hub.snapshot_download(name, allow_patterns=_SMALL, local_files_only=offline))
        except (OSError, ValueError) as error:
            reason = " (its host name does not resolve: no network?)" if offline else f" ({reason_of(error)})"
    path = expanded(name)
    siblings = [str(path.with_name(other.name)) for other in path.parent.iterdir()] if path.parent.is_dir() else []
    close = get_close_matches(str(path), siblings, n=1, cutoff=0.75)
    guess = f' Did you mean "{close[0]}"?' if close else ""
    kind = {"MODEL": "a folder nor a model", "--tokenizer": "a file, a folder nor a tokenizer"}[key]
    raise ValueError(f'{key}: "{name}" is neither {kind} on the Hub that can be reached{reason}.{guess}')


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]

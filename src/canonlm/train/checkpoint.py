"""Checkpoints of a run: `checkpoints/step-00000600/` holds the model as transformers saves it, and the rest.

Each is whole or not there. A finished run keeps its last one: `AutoModelForCausalLM.from_pretrained` loads it.
"""

import re
from pathlib import Path

import torch
from safetensors.torch import load_file

from canonlm.models import CanonLMForCausalLM
from canonlm.train.files import remove_folder, write_folder

TRAINING_STATE = "training_state.pt"
_NAME = re.compile(r"step-(\d{8})")


def save(folder: Path, step: int, model: CanonLMForCausalLM, optimizer: torch.optim.Optimizer, keep: int) -> None:
    """Write the state after `step` optimizer steps; then remove all but the `keep` newest."""
    state = {"step": step, "optimizer": optimizer.state_dict(), "torch_rng": torch.get_rng_state()}

    def fill(temporary: Path) -> None:
        model.save_pretrained(temporary)
        torch.save(state, temporary / TRAINING_STATE)

    write_folder(folder / f"step-{step:08d}", fill)
    prune(folder, keep)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the `keep` newest."""
    for old in steps(folder)[:-keep]:
        remove_folder(folder / f"step-{old:08d}")


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))


def newest(folder: Path) -> Path | None:
    """The newest checkpoint, for `from_pretrained`; None where there is none yet."""
    found = steps(folder)
    return folder / f"step-{found[-1]:08d}" if found else None


def load_latest(folder: Path, model: CanonLMForCausalLM, optimizer: torch.optim.Optimizer) -> int:
    """Restore model and optimizer in place; returns the number of steps done (0 without a checkpoint)."""
    if (path := newest(folder)) is None:
        return 0
    state = torch.load(path / TRAINING_STATE, weights_only=True)
    missing, surplus = model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
    # Tied weights are saved once; what is missing must be tied, and nothing may be left over.
    if surplus or set(missing) - set(model.all_tied_weights_keys):
        raise ValueError(f"{path}: not a checkpoint of this model; missing {missing}, surplus {surplus}")
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["torch_rng"])
    return state["step"]

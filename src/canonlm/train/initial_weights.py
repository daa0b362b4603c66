"""The weights from which the processes of a run start, drawn once on each machine.

Every process of a machine draws its share of the parts of a model (blocks, and the rest), and sends it to the others
there. Values are functions of (seed, parameter name), so it does not matter which process draws them. Weights of a
saved model are read by one process of a machine. A run that continues from a checkpoint draws nothing.
"""

import socket
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from canonlm.core.distributed import World
from canonlm.models.interface import LanguageModel
from canonlm.train.weights import Weights


class InitialWeights:
    """Gives memory and weights to the parts of a model on the meta device, in order: `place` each block, then the whole
    model, in every process alike. The device never holds more than one whole part; the machine's memory holds the model
    once, if several processes draw it.

    weights: replace initial values; not needed in all processes of a machine. resumed: a checkpoint will overwrite all
    values, so only tensors that checkpoints do not have are drawn.
    """

    def __init__(self, model: LanguageModel, world: World, weights: Weights | None, resumed: bool) -> None:
        self._model, self._world, self._weights, self._resumed = model, world, weights, resumed
        everyone = world.gather((socket.gethostname(), weights is not None))
        machines: dict[str, list[int]] = {}
        for rank, (name, _) in enumerate(everyone):
            machines.setdefault(name, []).append(rank)
        self._here = machines[everyone[world.rank][0]]
        self._drawing = [rank for rank in self._here if everyone[rank][1]] or self._here
        self._group = dist.new_subgroups_by_enumeration([*machines.values()])[0] if world.size > 1 else None
        self._parts = [*model.blocks, ""]
        if len(self._here) > 1:  # at the same time in all of them
            for name in self._parts:
                if self._source(name) == world.rank:
                    self._draw(name)

    def place(self, name: str) -> None:
        """The part of this name ("": all but the blocks) gets its memory on this device, and its weights."""
        source = self._source(name)
        if source == self._world.rank and len(self._here) == 1:
            self._draw(name)
        for module in self._modules(name):
            module._apply(self._on_device, recurse=False)
        if len(self._here) > 1 and not self._skipped(name):
            for tensor in {id(x): x for x in self._tensors(name)}.values():  # tied ones once
                dist.broadcast(tensor.detach(), source, self._group)

    def _draw(self, name: str) -> None:
        """Give weights to a part, on the CPU."""
        if self._skipped(name):
            return
        part = self._part(name)
        for module in self._modules(name):
            module._apply(lambda x: torch.empty_like(x, device="cpu") if x.is_meta else x, recurse=False)
        self._model.initialize(part, name)
        if self._weights is not None:
            self._weights.write(self._saved(name))

    def _on_device(self, x: Tensor) -> Tensor:
        return torch.empty_like(x, device=self._world.device) if x.is_meta else x.to(self._world.device)

    def _source(self, name: str) -> int:
        """The rank of the process of this machine that draws a part."""
        return self._drawing[self._parts.index(name) % len(self._drawing)]

    def _skipped(self, name: str) -> bool:
        saved = {id(x) for x in self._saved(name).values()}
        return self._resumed and all(id(x) in saved for x in self._tensors(name))

    def _part(self, name: str) -> nn.Module:
        return self._model.blocks[name] if name else self._model.module

    def _modules(self, name: str) -> list[nn.Module]:
        part = self._part(name)
        inside = {module for block in self._model.blocks.values() if block is not part for module in block.modules()}
        return [module for module in part.modules() if module not in inside]

    def _tensors(self, name: str) -> Iterator[Tensor]:
        for module in self._modules(name):
            yield from (*module.parameters(recurse=False), *module.buffers(recurse=False))

    def _saved(self, name: str) -> dict[str, Tensor]:
        """The tensors of a part that a checkpoint has, by their names in the model."""
        paths = {module: path for path, module in self._part(name).named_modules(prefix=name)}
        saved: dict[str, Tensor] = {}
        for module in self._modules(name):
            names = {*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False))}
            own = {key: x for key, x in module.state_dict(keep_vars=True).items() if key in names}
            saved |= {f"{paths[module]}.{key}".lstrip("."): x for key, x in own.items()}
        return saved

"""Models from outside as `LanguageModel`: any causal model of transformers (`hf:qwen3`), of
flash-linear-attention (`fla:kda`), or a module from a user's file.

Nothing here is specific to one model: blocks are found by the library's own `_no_split_modules`, weights are drawn
by its own `_init_weights`, documents begin where `position_ids` restart, which is its convention for packed rows.
Whether a model respects documents is checked (`canonlm.models.causality`).
"""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from canonlm.canon import sites as canon_sites
from canonlm.canon.layer import CanonLayer
from canonlm.canonize import canonize
from canonlm.canonize.find_modules import blocks_in
from canonlm.core.errors import InvalidSetting, expected
from canonlm.models import loss as losses
from canonlm.models.attend import reach
from canonlm.models.cache import positions_in_documents
from canonlm.models.generation import Generation
from canonlm.models.hf_small_configs import ACTIVE_EXPERTS, EXPERTS, causal_config, fla_config, names_of, refusal
from canonlm.models.initialize import generator_for
from canonlm.models.interface import LanguageModel, Loss, Sizes
from canonlm.models.state import bytes_after
from canonlm.models.user_model import made_outside
from canonlm.ops.varlen import Documents

_PLAIN: Any = SimpleNamespace(z_loss=None, z_loss_weight=0.0)
"""The loss without z-loss."""

MAX_COUNTED = 2**26
"""Parameters of the largest model that is built on the CPU to count its state."""


def library_model(arch: str, sizes: Sizes, seed: int = 0) -> "ForeignModel":
    """`hf:qwen3{num_key_value_heads=2}`, `hf:qwen3+canon=AC`, `fla:kda`: random weights, on torch's default device.

    On the meta device its parts still have to be allocated (`to_empty`) and initialized. One-line InvalidSetting for an
    unknown type or field, sizes or sites that the type cannot have, and a type that cannot be built here.
    """
    fla = arch.startswith("fla:")
    host, sites = split_canon(arch)
    model_class, config = (fla_config if fla else causal_config)(host, sizes)

    def make() -> PreTrainedModel:
        with _drawing(generator_for(seed, host)):
            module = model_class._from_config(copy.deepcopy(config), dtype=torch.float32)
            _train_all_tokens(module)
            return canonize(module, sites, init="uniform") if sites else module

    try:
        module = make()
    except InvalidSetting as error:
        raise InvalidSetting("arch", f"arch: {arch} cannot be built: {error}") from None
    except Exception as error:  # other people's code: it needs a package or a GPU, or cannot have these sizes
        raise refusal(arch, "cannot be built here", error) from error
    return (FlaModel if fla else ForeignModel)(arch, module, seed, make=make)


def _train_all_tokens(module: PreTrainedModel) -> None:
    if isinstance(table := module.get_input_embeddings(), nn.Embedding):
        table.padding_idx = None  # that token would not be trained


def split_canon(arch: str) -> tuple[str, str]:
    """`hf:qwen3+canon=A:zero,D` is (`hf:qwen3`, `A:zero,D`), in canonical form, "" without sites. `+canon` alone means
    ABCD."""
    host, plus, modifier = arch.partition("+canon")
    if not plus:
        return arch, ""
    if modifier and not modifier.startswith(("=", ":")):
        raise expected("arch", "no modifier but +canon behind a model that is not our decoder", arch)
    value = modifier.removeprefix("=") if modifier else None
    return host, canon_sites.write(canon_sites.of_modifier(value))


def outside_model(arch: str, factory: Callable[..., nn.Module], sizes: Sizes, seed: int = 0) -> "ForeignModel":
    """`mine.py:Net{depth=3}`: the model that a class or a factory from outside returns, with its weights; always on the
    CPU. A module that maps ids `[B, T]` to logits `[B, T, V]` is wrapped, a model of transformers is not.

    One-line InvalidSetting for a field that it does not take, and for an exception of its code.
    """
    with torch.device("cpu"), _drawing(generator_for(seed, arch)):
        module = made_outside(arch, factory, sizes)
        _train_all_tokens(module)
    return ForeignModel(arch, module, seed, has_weights=True)


class ForeignModel(LanguageModel):
    """A causal model of transformers, or one that is wrapped as such."""

    def __init__(
        self,
        arch: str,
        module: PreTrainedModel,
        seed: int = 0,
        *,
        make: Callable[[], PreTrainedModel] | None = None,
        has_weights: bool = False,
    ) -> None:
        """make: builds the module again, on torch's default device. has_weights: keep the module's weights."""
        super().__init__(module, seed)
        self.arch = arch
        self._make = make
        self._accepts = set(inspect.signature(module.forward).parameters)
        self._plain_head: bool | None = None
        # Computed once: wrappers that are added later change neither the parts nor their names.
        self._paths = {part: name for name, part in module.named_modules()}
        self._blocks = find_blocks(module)
        self.generate = self._generation = Generation(self)  # type: ignore[method-assign]
        if self.device.type != "meta" and not has_weights:
            for name, part in {"": module, **self._blocks}.items():
                self.initialize(part, name)

    @property
    def blocks(self) -> dict[str, nn.Module]:
        return dict(self._blocks)

    @property
    def reads_padding(self) -> bool:
        return not self._generation.works.padding

    def logits(self, input_ids: Tensor, documents: Documents | None = None) -> Tensor:
        return self._forward(input_ids, documents).logits

    def loss(
        self,
        input_ids: Tensor,
        targets: Tensor,
        documents: Documents | None,
        num_targets: float | Tensor,
    ) -> Loss:
        head = self.module.get_output_embeddings()
        bytes_of_logits = 4 * targets.numel() * self.module.config.get_text_config().vocab_size
        large = bytes_of_logits > losses.chunk_bytes(targets.device.type)
        if large and type(head) is nn.Linear and head.bias is None and self._head_is_plain(head):
            # In place of the head, inside the model's forward, so that wrappers around the model still apply.
            def sums(h: Tensor) -> Tensor:
                return losses.loss_of_hidden(_PLAIN, h, head.weight, targets, compiled=self.compiled_loss)[0]

            with losses.replaced_forward(head, sums):
                outputs = self._forward(input_ids, documents)
            loss = outputs.logits
        else:
            outputs = self._forward(input_ids, documents)
            loss, _ = losses.loss_of_logits(_PLAIN, outputs.logits, targets)
        router = getattr(outputs, "aux_loss", None) if self.module.training else None  # not part of an evaluation
        if isinstance(router, Tensor):  # where the configuration has output_router_logits
            weight = getattr(self.module.config.get_text_config(), "router_aux_loss_coef", 0.0)
            loss = loss + weight * router * (targets != -100).sum()
        return Loss(loss / num_targets)

    def _forward(self, input_ids: Tensor, documents: Documents | None) -> Any:
        kwargs: dict[str, Any] = {"use_cache": False} if "use_cache" in self._accepts else {}
        if documents is not None:
            if "doc_ids" in self._accepts:
                kwargs["doc_ids"] = documents.ids
            if "position_ids" in self._accepts:
                kwargs["position_ids"] = positions_in_documents(documents.ids, None)
        return self.module(input_ids=input_ids, **kwargs)

    @torch.no_grad()
    def _head_is_plain(self, head: nn.Linear) -> bool:
        """Whether the head's output is the logits, not capped or scaled after it. Tried once, with made-up outputs."""
        if self._plain_head is None:
            ids = torch.zeros(1, 8, dtype=torch.long, device=self.device)
            made = 30 * torch.arange(8 * head.out_features, device=self.device).float().sin().view(1, 8, -1)
            try:
                with losses.replaced_forward(head, lambda h: made):
                    unchanged = torch.equal(self._forward(ids, None).logits, made)
                with losses.replaced_forward(head, lambda h: made.sum()):
                    self._plain_head = unchanged and torch.equal(self._forward(ids, None).logits, made.sum())
            except Exception:  # the model's code depends on the shape of the logits
                self._plain_head = False
        return self._plain_head

    @torch.no_grad()
    def initialize(self, part: nn.Module, name: str) -> None:
        """Call the library's own `_init_weights`, module by module from the inside out, each with the generator of its
        name.

        Blocks inside a part are skipped, as they are parts themselves. So the order and device in which parts are
        initialized do not matter.
        """
        blocks = set(self._blocks.values()) - {part}
        modules = list(_inside_out(part, blocks))
        device = next(
            (tensor.device for module in modules for tensor in _own_tensors(module).values()), torch.device("cpu")
        )
        for module in modules:  # drawn on the CPU, so that a seed means the same on every device
            module._apply(lambda tensor: tensor.cpu(), recurse=False)
            for tensor in _own_tensors(module).values():
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)
        # A module around blocks must not change their weights.
        with _loaded([tensor for block in blocks for tensor in block.state_dict(keep_vars=True).values()]):
            for module in modules:
                path = self._paths[module]
                if isinstance(module, CanonLayer):
                    for key, parameter in module.named_parameters(recurse=False):
                        module.fill(key, parameter, generator_for(self.seed, f"{path}.{key}"))
                    continue
                with _drawing(generator_for(self.seed, path)):
                    self._owner(path)._init_weights(module)
        for module in modules:
            for key, tensor in _own_tensors(module).items():
                if tensor.numel() and tensor.isnan().all():  # the library leaves it as the constructor made it
                    tensor.copy_(self._as_built[f"{self._paths[module]}.{key}".lstrip(".")])
            module._apply(lambda tensor: tensor.to(device), recurse=False)

    @cached_property
    def _as_built(self) -> dict[str, Tensor]:
        """Parameters and buffers as the model's constructor makes them."""
        return dict([*self._cpu_copy.named_parameters(), *self._cpu_copy.named_buffers()])

    def _owner(self, path: str) -> PreTrainedModel:
        """The innermost transformers model around a module: composite models have several."""
        owner, module = self.module, self.module
        for key in path.split(".") if path else []:
            module = getattr(module, key)
            owner = module if isinstance(module, PreTrainedModel) else owner
        return owner

    def forward_flops(self, seq_len: int) -> dict[str, float]:
        """FLOPs per token. Recurrences count with their projections only, experts with those that a token uses."""
        config = self.module.config.get_text_config()
        head = self.module.get_output_embeddings()
        active, experts = _first_int(config, *ACTIVE_EXPERTS), _first_int(config, *EXPERTS)
        used = min(1.0, active / experts) if active and experts else 1.0
        parts = {"linear": 0.0, "attention": 0.0, "recurrence": 0.0, "conv": 0.0}
        for path, module in self.module.named_modules():
            if module is head:
                continue
            weights = sum(p.numel() for p in module.parameters(recurse=False) if p.ndim > 1)
            is_expert = ".experts" in path or any(p.ndim == 3 for p in module.parameters(recurse=False))
            if isinstance(module, CanonLayer):
                parts["conv"] += module.flops
            elif isinstance(module, nn.Conv1d):
                parts["conv"] += 2 * weights
            elif isinstance(module, nn.Linear | Conv1D) or (is_expert and not isinstance(module, nn.Embedding)):
                parts["linear"] += 2 * weights * (used if is_expert else 1.0)
        width, layers = _first_int(config, "hidden_size"), getattr(config, "per_layer_config", None) or []
        for index, tokens in self._reaches(seq_len):
            layer = layers[index] if index < len(layers) else config  # heads may differ from layer to layer
            heads = _first_int(layer, "num_attention_heads")
            # In latent attention `head_dim` is that of the rotated part, in Zamba there is none.
            keys = _first_int(layer, "qk_head_dim", "attention_head_dim", "head_dim") or (
                width // heads if heads else 0
            )
            values = _first_int(layer, "v_head_dim") or keys
            parts["attention"] += 2 * heads * (keys + values) * tokens
        vocabulary = head.weight.numel() if head is not None else width * config.vocab_size
        return {**parts, "head": 2.0 * vocabulary}

    @property
    def only_projections(self) -> bool:  # type: ignore[override]
        kinds = getattr(self.module.config.get_text_config(), "layer_types", None) or []
        return any("hybrid" in kind for kind in kinds) or len(list(self._reaches(1))) < len(self._blocks)

    def _numbers(self, keys: Iterable[str]) -> dict[str, int]:
        config_class = type(self.module.config.get_text_config())
        settable = {*names_of(config_class), *config_class.attribute_map}  # others are derived from these
        return {key: value for key, value in super()._numbers(keys).items() if key in settable}

    def bytes_after(self, num_tokens: int) -> int | None:
        """A model whose code needs values is counted on the CPU if it is small."""
        try:
            return super().bytes_after(num_tokens)
        except Exception:  # other people's code: no cache, or not on the meta device
            small = self._make is not None and self.num_parameters <= MAX_COUNTED
        try:
            with torch.device("cpu"):
                return bytes_after(self._cpu_copy, num_tokens) if small and self.device.type == "meta" else None
        except Exception:
            return None

    @cached_property
    def _cpu_copy(self) -> PreTrainedModel:
        assert self._make is not None
        with torch.device("cpu"):
            return self._make()

    def _reaches(self, seq_len: int) -> Iterator[tuple[int, float]]:
        """The attention layers by index, and the mean number of tokens that a token attends to."""
        config = self.module.config.get_text_config()
        window = _first_int(config, "sliding_window", "attention_window_size") or seq_len
        chunk = min(seq_len, _first_int(config, "attention_chunk_size") or seq_len)
        types = getattr(config, "layer_types", None) or []
        # As in the library's caches: a window without types of layers is one of all layers.
        usual = "sliding_attention" if _first_int(config, "sliding_window") else "full_attention"
        for index, block in enumerate(self._blocks.values()):
            kind = types[index] if len(types) == len(self._blocks) else None
            if kind is None and any("Attention" in type(m).__name__ for m in block.modules()):
                kind = usual
            if kind in ("sliding_attention", "hybrid_sliding"):
                yield index, reach(seq_len, window)
            elif kind == "chunked_attention":
                yield index, chunk / 2
            elif kind == "indexed_attention":
                yield index, reach(seq_len, _first_int(config, "index_topk"))
            elif kind in ("full_attention", "hybrid"):
                yield index, seq_len / 2


class FlaModel(ForeignModel):
    """A model of flash-linear-attention: its kernels take documents as borders of one long row (`cu_seqlens`)."""

    def _forward(self, input_ids: Tensor, documents: Documents | None) -> Any:
        if documents is None:
            return super()._forward(input_ids, None)
        starts = (positions_in_documents(documents.ids, None).flatten() == 0).nonzero()[:, 0]
        borders = nn.functional.pad(starts, (0, 1), value=input_ids.numel()).int()
        outputs = self.module(input_ids=input_ids.view(1, -1), cu_seqlens=borders, use_cache=False)
        if outputs.logits.ndim:  # else it is the loss, computed in place of the head
            outputs.logits = outputs.logits.view(*input_ids.shape, -1)
        return outputs


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The lists of modules that the library does not split (`_no_split_modules`), else the longest list of equal
    modules, else the model's children."""
    lists = {name: part for name, part in module.named_modules() if isinstance(part, nn.ModuleList) and len(part)}
    blocks = blocks_in(module, lists, lambda name: (len(lists[name]), -name.count(".")))
    owners = Counter(parameter for block in blocks.values() for parameter in set(block.parameters()))
    if max(owners.values(), default=1) > 1:  # shared parameters cannot be sharded block by block
        whole_model = str(module.base_model_prefix)
        return {whole_model: module.get_submodule(whole_model)}
    return blocks or dict(module.named_children())


def _inside_out(part: nn.Module, leaving_out: set[nn.Module]) -> Iterator[nn.Module]:
    for child in part.children():
        if child not in leaving_out:
            yield from _inside_out(child, leaving_out)
    yield part


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])


@contextmanager
def _loaded(tensors: list[Tensor]) -> Iterator[None]:
    """Within this context, the library's initialization leaves these tensors alone, as if they had been loaded."""
    for tensor in tensors:
        setattr(tensor, "_is_hf_initialized", True)  # noqa: B010
    try:
        yield
    finally:
        for tensor in tensors:
            delattr(tensor, "_is_hf_initialized")


@contextmanager
def _drawing(generator: torch.Generator) -> Iterator[None]:
    """Within this context, torch's CPU generator has the state of this one; afterwards it is as before."""
    default, state = torch.default_generator, torch.default_generator.get_state()
    default.set_state(generator.get_state())
    try:
        yield
    finally:
        default.set_state(state)


def _first_int(config: Any, *names: str) -> int:
    for name in names:
        try:
            value = getattr(config, name, None)
        except Exception:  # the library raises if the field differs from layer to layer
            continue
        if isinstance(value, int):
            return value
    return 0

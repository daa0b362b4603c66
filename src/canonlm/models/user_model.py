"""A module from a user's file as a model of transformers: ids `[B, T]` in, logits `[B, T, V]` out."""

import dataclasses
import inspect
from collections.abc import Callable
from traceback import extract_tb
from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from canonlm.core.errors import InvalidSetting
from canonlm.models.hf_small_configs import OF_TEXT, check_known, parse, refusal
from canonlm.models.interface import Sizes


def made_outside(arch: str, factory: Callable[..., nn.Module], sizes: Sizes) -> PreTrainedModel:
    """Call `factory` with the sizes for which it has parameters, `sizes.fields` and the settings in braces."""
    _, options = parse(arch)
    plain = {f.name: getattr(sizes, f.name) for f in dataclasses.fields(sizes) if f.name != "fields"}
    offered = plain | {"max_position_embeddings": sizes.seq_len, "sizes": sizes}
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        raise InvalidSetting("arch", f"arch: {arch} is not a class or a function that makes a model") from None
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    chosen = {**sizes.fields, **options}
    if not takes_all:
        check_known(arch, chosen, options, [*parameters, *OF_TEXT])
    kwargs = {name: value for name, value in (offered | chosen).items() if name in parameters}
    if takes_all:
        kwargs |= plain | chosen
    try:
        made = factory(**kwargs)
    except Exception as error:  # raised by the user's code
        raise refusal(arch, "cannot be built", error, place_of(error, factory)) from error
    if not isinstance(made, nn.Module):
        raise InvalidSetting("arch", f"arch: {arch} made a {type(made).__name__}, not a torch.nn.Module")
    if next(made.parameters(), None) is None:
        raise InvalidSetting("arch", f"arch: {arch} made a model without parameters")
    if isinstance(made, PreTrainedModel):
        return made
    return Wrapped(WrappedConfig(arch=arch, **plain), made)


class WrappedConfig(PreTrainedConfig):
    """The name under which canonlm makes the module, and its sizes."""

    model_type = "canonlm_outside"
    arch: str = ""
    vocab_size: int = 1
    hidden_size: int = 1
    num_hidden_layers: int = 1
    num_attention_heads: int = 1
    seq_len: int = 1


class Wrapped(PreTrainedModel, GenerationMixin):
    """A module as a model of transformers. Its parameters keep their names, after `model.`, and their values."""

    config_class = WrappedConfig
    base_model_prefix = "model"

    def __init__(self, config: WrappedConfig, module: nn.Module) -> None:
        super().__init__(config)
        self.model = module
        self._takes = set(inspect.signature(module.forward).parameters)
        first: dict[Tensor, str] = {}
        tied = {n: first[p] for n, p in self.named_parameters(remove_duplicate=False) if first.setdefault(p, n) != n}
        self._tied_weights_keys, config.tie_word_embeddings = tied, bool(tied)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        doc_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        **_: Any,
    ) -> CausalLMOutput:
        """`[B, T]`. The module gets `doc_ids` and `position_ids` where it has parameters for them."""
        offered = {"doc_ids": doc_ids, "position_ids": position_ids}
        kwargs = {name: value for name, value in offered.items() if name in self._takes and value is not None}
        logits = self.model(input_ids, **kwargs)
        if not isinstance(logits, Tensor):
            logits = logits[0] if isinstance(logits, tuple | list) else logits.logits
        return CausalLMOutput(logits=logits)

    def prepare_inputs_for_generation(self, input_ids: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}  # without a cache: the whole row again for every token

    def get_input_embeddings(self) -> Any:
        tables = (part for part in self.model.modules() if isinstance(part, nn.Embedding))
        return next((table for table in tables if table.num_embeddings == self.config.vocab_size), None)

    def get_output_embeddings(self) -> Any:
        linear = [part for part in self.model.modules() if isinstance(part, nn.Linear)]
        return next((part for part in reversed(linear) if part.out_features == self.config.vocab_size), None)


def place_of(error: Exception, factory: Any) -> str:
    """The line of an error in the file of a class or a function: `, line 3`."""
    try:
        file = inspect.getsourcefile(factory)
    except TypeError:
        return ""
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == file]
    return f", line {lines[-1]}" if lines else ""

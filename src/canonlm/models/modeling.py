"""The decoder: one class for every architecture.

    h = canonE( embedding );  for every block: h = block(h)  (`canonlm.models.block`);  logits = head( norm(h) )

Parameters are named as in transformers' Llama, so that a plain Llama's state dict loads as it is.
"""

import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from canonlm.canon.layer import CanonLayer, untouched
from canonlm.canon.sites import SITES
from canonlm.canon.variants import make_canon
from canonlm.core.cache_name import CACHE
from canonlm.core.errors import expected
from canonlm.core.saved import check_loaded, check_saved
from canonlm.models.apply_canon import Slot, run_site
from canonlm.models.attention_residuals import AttentionResidual, Output, output_of
from canonlm.models.block import DecoderLayer
from canonlm.models.cache import Layout, check_cache, count_tokens, for_canon
from canonlm.models.check_sites import check_sites, of_saved
from canonlm.models.config import CanonLMConfig
from canonlm.models.initialize import init_parameters
from canonlm.models.layout import check_documents, check_mask, lay_out
from canonlm.models.loss import Sums, loss_of_hidden, loss_of_logits, mean_loss, replaced_forward
from canonlm.models.masks import make_mask
from canonlm.models.mixers.attention import Attention
from canonlm.models.norm import RMSNorm
from canonlm.models.other_names import check_arguments, read_rotary, refuse_unknown
from canonlm.models.positions import rotary_table
from canonlm.ops.context_parallel import Span
from canonlm.ops.varlen import Documents


class _OfConfig:
    """A class attribute of the library's that depends on the configuration. The class itself has the `usual` value: a
    property would be true there, and the library's tests, for example, ask the class."""

    def __init__(self, usual: bool, of_config: Callable[[CanonLMConfig], bool]) -> None:
        self.usual, self.of_config = usual, of_config

    def __get__(self, model: "CanonLMPreTrainedModel | None", _: type) -> bool:
        return self.usual if model is None else self.of_config(model.config)


class CanonLMPreTrainedModel(PreTrainedModel):
    config: CanonLMConfig
    config_class = CanonLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": DecoderLayer, "attentions": Attention}

    _is_stateful = _OfConfig(False, lambda config: config.is_recurrent)
    _supports_flash_attn = _OfConfig(True, lambda config: config.alibi is None and not config.attention_sink)
    _supports_flex_attn = _OfConfig(True, lambda config: config.alibi is None)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args, **kwargs) -> str:
        if self.config.alibi is not None and attn_implementation not in (None, "sdpa", "eager"):
            what = '"sdpa" or "eager" with alibi, which other kernels have no place for'
            raise expected("attn_implementation", what, attn_implementation)
        if self.config.attention_sink and "flash" in (attn_implementation or ""):
            what = '"sdpa", "eager" or "flex_attention" with attention_sink: not every flash attention reads sinks'
            raise expected("attn_implementation", what, attn_implementation)
        if attn_implementation == "vllm":
            _check_attention_only(self.config)
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, strict: bool = True, **kwargs):
        """As for every model of transformers, but strict: ValueError names the tensors that are missing, unknown, of
        another shape or not floating-point, where the library would continue with random numbers.

        strict=False: as the library does it, to load some of the weights, for example.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        place = pretrained_model_name_or_path
        with of_saved():
            if strict:
                check_saved(cls, place, kwargs)
            opened: Any = super().from_pretrained(place, *model_args, output_loading_info=True, **kwargs)
        model, info = opened
        if strict:
            check_loaded(str(place), model, info, bool(kwargs.get("ignore_mismatched_sizes")))
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory, *args, self_contained: bool = False, **kwargs) -> None:
        """As transformers'. With `self_contained` the folder includes its code, and `from_pretrained(…,
        trust_remote_code=True)` loads it where canonlm is not installed."""
        vars(self.config).pop("auto_map", None)  # of the folder that this model was loaded from
        if self_contained and hasattr(self, "new_head"):
            raise expected("self_contained", "False for a classifier: only language models are saved with code", True)
        if self_contained:
            from canonlm.canonize.canonized_model import NOT_PUSHED
            from canonlm.models.self_contained import write_code

            if kwargs.get("push_to_hub"):
                raise expected("push_to_hub", NOT_PUSHED, True)
            self.config.auto_map = write_code(self.config, save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)

    def initialize_weights(self) -> None:
        # The library passes modules to `_init_weights` one by one, without the names that our draws depend on.
        for name, module in self.named_modules():
            module._init_name = name
        super().initialize_weights()
        # Not when layers are built: loading replaces their parameters with trainable ones, and calls this last.
        for module in self.modules():
            if isinstance(module, CanonLayer) and module.frozen:
                module.requires_grad_(False)

    def _init_weights(self, module: nn.Module) -> None:
        # A module without a name is new, in place of an embedding or a head of fewer tokens.
        new = "embed_tokens" if isinstance(module, nn.Embedding) else "lm_head"
        init_parameters(module, str(getattr(module, "_init_name", new)), self.config)


def _check_attention_only(config: CanonLMConfig) -> None:
    """InvalidSetting if vLLM would compute something else. It calls every model without a cache and keeps keys and
    values itself, so that Canon and recurrent layers would start from zero at every token."""
    if set(config.mixers) != {"attention"}:
        raise expected("mixers", "attention in all layers under vLLM, which keeps keys and values only", config.mixers)
    for key in ("attention_sink", "sliding_window"):
        if getattr(config, key):
            raise expected(key, "none under vLLM, to which our attention does not pass it", getattr(config, key))
    if any(config.canon_texts):
        what = "no Canon layers under vLLM, which keeps keys and values only"
        raise expected("canon_set", what, config.canon_set if config.canon_sets is None else config.canon_sets)
    if config.mlp == "moe":
        raise expected("mlp", '"gated", "standard" or "none" under vLLM, which would replace the experts', config.mlp)
    # Not an import statement: transformers would want vLLM wherever a self-contained folder is opened.
    parallel_state = importlib.import_module("vllm.distributed.parallel_state")
    if parallel_state.model_parallel_is_initialized() and (size := parallel_state.get_tp_group().world_size) > 1:
        raise expected("tensor_parallel_size", "1: vLLM has no plan to share our layers among devices", size)


@dataclass
class DecoderOutput(BaseModelOutputWithPast):
    """As for every decoder of transformers, and with experts in training the sum of their layers' router losses."""

    router_loss: Tensor | None = None


class CanonLMModel(CanonLMPreTrainedModel):
    """Embedding, blocks and final norm."""

    def __init__(self, config: CanonLMConfig) -> None:
        super().__init__(config)
        later = dict(vars(config))  # with what was set after the configuration was made: vLLM sets rope_parameters
        read_rotary(later, config.rope_theta, math.nan)
        refuse_unknown(later, config.__dataclass_fields__)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        canons = config.canons(0)
        self.canons = [letter for letter in canons if SITES[letter].part == "model"]
        for letter in self.canons:
            self.add_module(f"canon{letter}", make_canon(canons[letter], config.hidden_size))
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        if config.attention_residuals:
            self.residual = AttentionResidual(config.hidden_size)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.convolves = any(map(config.sites, range(config.num_hidden_layers)))
        if self.convolves:
            check_sites(config, self)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        doc_ids: Tensor | Documents | None = None,
        use_cache: bool | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        span: Span | None = None,
        cache: Any = None,
        **kwargs,
    ) -> DecoderOutput:
        """As every decoder of transformers, with `doc_ids`: the documents of packed rows, one integer per token, or
        `ops.varlen.Documents`; with a filled cache they cover the cached tokens too, as `attention_mask` does. If
        nothing is cached yet, they may come by the library's own conventions: `seq_idx`, as `doc_ids`; positions that
        restart; borders (`cu_seq_lens_q`, `max_length_q`), which kernels read. If these need borders that are missing,
        the forward waits for the GPU. A mask of all pairs, `[B, 1, T, tokens]`, also shows padding and
        documents. `span`: in training without a cache, the part of the rows that `input_ids` are; everything else is
        then of whole rows. `cache`: `past_key_values` by the name it has since transformers 5.24, or the cache
        of `generate_batch`. ValueError for an argument that nothing reads."""
        cache = past_key_values if cache is None else cache
        # That of `generate_batch`, whose arguments only attention reads.
        paged = cache is not None and not isinstance(cache, Cache)
        if paged:
            kwargs |= {"cu_seq_lens_q": cu_seq_lens_q, "max_length_q": max_length_q}
        else:
            kwargs = check_arguments(kwargs, _ARGUMENTS)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected exactly one of input_ids and inputs_embeds")
        if len(self.layers) > len(self.config.mixers):  # copies of layers, by PEFT's layer_replication
            raise expected("layers", f"{len(self.config.mixers)}, as in the configuration", len(self.layers))
        h_BTD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if cache is not None and not paged:
            check_cache(cache, self.config)
            if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                raise expected(CACHE, "none in training with gradient checkpointing: a block is computed twice", cache)

        config, rotary = self.config, None
        masks: dict[int | None, Any] = {}  # by the window of a layer
        # In place of `h` where only its shape, dtype and device are read.
        rows_BTD = h_BTD if span is None else h_BTD[:, :1].expand(-1, span.size * h_BTD.shape[1], -1)
        attention_mask = check_mask(config, attention_mask, h_BTD.dtype, None if paged else cache, *rows_BTD.shape[:2])
        borders = None if cu_seq_lens_q is None else (cu_seq_lens_q, max_length_q)
        layout, all_ids, position_ids = (
            (Layout(), None, position_ids)
            if paged
            else lay_out(
                config,
                rows_BTD,
                attention_mask,
                position_ids,
                cache,
                doc_ids,
                seq_idx,
                borders,
                convolves=self.convolves,
                training=self.training,
            )
        )
        if span is not None:
            layout, position_ids = replace(layout, span=span), span.cut(cast(Tensor, position_ids))
        if self.convolves:
            layout = for_canon(layout, h_BTD, cache)
        for letter in self.canons:
            slot = Slot(layout, cache, 0, config.sites(0).index(letter))
            [h_BTD] = run_site([self.get_submodule(f"canon{letter}")], [h_BTD], slot)
        if config.attends:
            if rows_BTD.numel() and not layout.without_mask:
                for window in dict.fromkeys(config.window(i) for i in config.attending):
                    made, order = make_mask(config, window, rows_BTD, attention_mask, None if paged else cache, all_ids)
                    masks[window] = made
                    layout = layout if order is None else replace(layout, key_order=order)
            if config.rope_dim:
                rotary = rotary_table(cast(Tensor, position_ids), config.rope_dim, config.rope_theta, h_BTD.dtype)
        router_losses, first = [], None
        outputs: tuple[Output, ...] = ()
        if config.attention_residuals:
            outputs = (output_of(h_BTD, config.rms_norm_eps),)
        if config.attention_residuals or any(getattr(layer, "hands_on", False) for layer in self.layers):
            recompute = getattr(self, "_gradient_checkpointing_func", None) if self.gradient_checkpointing else None
            if getattr(recompute, "keywords", {}).get("use_reentrant"):
                what = "False with attention residuals and value_residual: blocks read what earlier ones return"
                raise expected("use_reentrant", what, True)
        depth = config.num_hidden_layers  # smaller while the library's `assistant_early_exit` drafts tokens
        for layer_idx, layer in enumerate(self.layers if depth >= len(self.layers) else self.layers[:depth]):
            h_BTD, router_loss, outputs, first = layer(
                h_BTD,
                layout,
                attention_mask=masks.get(config.window(layer_idx)),
                rotary=rotary,
                cache=cache,
                outputs=outputs,
                first=first,
                **kwargs,
            )
            if router_loss is not None:
                router_losses.append(router_loss)
        count_tokens(cache, config, h_BTD)
        h_BTD = self.residual(outputs) if config.attention_residuals else h_BTD
        return DecoderOutput(
            last_hidden_state=self.norm(h_BTD),
            **{CACHE: cache},
            router_loss=torch.stack(router_losses).sum() if router_losses else None,
        )


_ARGUMENTS = tuple(inspect.signature(CanonLMModel.forward).parameters)[1:-1]


@dataclass
class CausalLMOutput(CausalLMOutputWithPast):
    """As for every causal model of transformers, and the part of the loss that is z-loss, if the configuration has
    it."""

    z_loss: Tensor | None = None


class CanonLMForCausalLM(CanonLMPreTrainedModel, GenerationMixin):
    """The decoder with a language-model head; everything transformers' causal models do."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: CanonLMConfig) -> None:
        super().__init__(config)
        self.model = CanonLMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        doc_ids: Tensor | Documents | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        loss_only: bool = False,
        compiled_loss: bool = False,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Any = None,
        **kwargs,
    ) -> CausalLMOutput:
        """With targets, also computes the loss: the mean over labelled ones, or the sum divided by
        `num_items_in_batch`.

        `shift_labels[b, t]`, another keyword, is what follows `input_ids[b, t]`, or -100; `labels[b, t]` is the target
        for `input_ids[b, t]` itself, as elsewhere in transformers, and shifted here. With `loss_only` there are no
        logits: the loss is computed without holding them all (`loss_of_hidden`; `compiled_loss` is explained there).
        The head's weight may then be a DTensor, sharded by rows over a tensor-parallel group, and the head a unit of
        FSDP. A head that is more than a weight (with LoRA or hooks) is called, and its logits are held for the loss.
        A `loss_function` that was set gets what transformers' models give it, and is the whole loss."""
        # Not a named argument: Trainer takes those with "label" in their names for columns of the data.
        shift_labels: Tensor | None = kwargs.pop("shift_labels", None)
        given: dict[str, Any] = {} if shift_labels is None else {"shift_labels": shift_labels}
        if labels is not None and shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        if loss_only and shift_labels is None:
            raise ValueError("expected labels or shift_labels with loss_only")
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            cache=cache,
            inputs_embeds=inputs_embeds,
            doc_ids=doc_ids,
            use_cache=use_cache,
            **kwargs,
        )
        h_BTD, logits, loss, z_loss = outputs.last_hidden_state, None, None, None
        if not loss_only:
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(h_BTD[:, keep])
        if shift_labels is not None and (own := getattr(self, "_loss_function", None)) is not None:
            given |= {"labels": labels, "num_items_in_batch": num_items_in_batch}
            every = self.lm_head(h_BTD) if logits is None else logits
            loss = own(logits=every, vocab_size=self.config.vocab_size, **given)
        elif shift_labels is not None:
            rows = (h_BTD if logits is None else logits).shape[:2]
            if shift_labels.shape != rows:  # the loss in chunks would take the first tokens of all rows
                what = f"shape {tuple(rows)}, a target for every token with logits"
                raise expected("shift_labels" if given else "labels", what, tuple(shift_labels.shape))
            if logits is None:
                sums = self._loss_only(h_BTD, shift_labels, compiled_loss)
            else:
                sums = loss_of_logits(self.config, logits, shift_labels)
            loss, z_loss = mean_loss(self.config, sums, shift_labels, outputs.router_loss, num_items_in_batch)
        return CausalLMOutput(
            loss=loss,
            z_loss=z_loss,
            logits=logits,
            **{CACHE: getattr(outputs, CACHE)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _loss_only(self, h_BTD: Tensor, targets_BT: Tensor, compiled: bool) -> Sums:
        head = self.lm_head

        def sums(h_BTD: Tensor) -> Sums:
            return loss_of_hidden(self.config, h_BTD, head.weight, targets_BT, compiled=compiled)

        if type(head).__bases__ == (FSDPModule, nn.Linear):  # a call gathers its weight
            with replaced_forward(head, sums):
                return head(h_BTD)
        # A call of the head may do more than a product (LoRA, hooks, quantization).
        if type(head) is nn.Linear and (isinstance(head.weight, DTensor) or untouched(head)):
            return sums(h_BTD)
        return loss_of_logits(self.config, head(h_BTD), targets_BT)

    def init_continuous_batching(self, *args, **kwargs):
        """As the library's (`generate_batch`). ValueError unless the model has attention alone, for whose keys and
        values there is a paged cache."""
        config = self.config
        plain = config.alibi is None and not config.attention_sink and config.sliding_window is None
        if self.model.convolves or set(config.mixers) != {"attention"} or not plain:
            what = "a model of attention layers alone, without Canon layers, ALiBi, sinks and windows (use generate)"
            raise expected("generate_batch", what, type(self).__name__)
        return super().init_continuous_batching(*args, **kwargs)

    @staticmethod
    def create_masks_for_generate(
        config: CanonLMConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ):
        """The mask that `generate` passes to the forward, with a static cache. Prefill keeps the two-dimensional one:
        Canon layers could not read padding from a four-dimensional one. A step of one token, real in every row, gets
        the mask of fixed size that attention reads: a growing mask would be compiled again at every token."""
        padded = attention_mask is not None and not bool(attention_mask[:, -1].all())
        if inputs_embeds.shape[1] > 1 or padded or config.alibi is not None or config.sliding_layers is not None:
            return attention_mask
        window = config.sliding_window
        cache = past_key_values if cache is None else cache
        made, _ = make_mask(config, window, inputs_embeds, attention_mask, cache, None)
        return made if config.attends else None

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids, inputs_embeds: Tensor | None = None, doc_ids: Tensor | None = None, **kwargs
    ):
        inputs = super().prepare_inputs_for_generation(  # type: ignore[misc]
            input_ids, inputs_embeds=inputs_embeds, **kwargs
        )
        if doc_ids is not None:
            inputs["attention_mask"] = kwargs.get("attention_mask")  # the documents are not in a prepared one
            # One per token: fewer while a prompt is read in chunks; new tokens belong to their row's last document.
            cache, ids = inputs.get(CACHE), inputs["input_ids"]
            length = (inputs["inputs_embeds"] if ids is None else ids).shape[1]
            length += 0 if cache is None else int(cache.get_seq_length())
            new = doc_ids[:, -1:].expand(-1, max(0, length - doc_ids.shape[1]))
            inputs["doc_ids"] = torch.cat([doc_ids[:, :length], new], dim=1)
        elif (cache := inputs.get(CACHE)) is not None and not torch.compiler.is_compiling():
            check_documents(cache, None)
        return inputs


# The library finds classes here by their names: Trainer (whether labels are shifted), pipelines, `transformers serve`.
MODEL_MAPPING_NAMES.update(canonlm=CanonLMModel.__name__)
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.update(canonlm=CanonLMForCausalLM.__name__)

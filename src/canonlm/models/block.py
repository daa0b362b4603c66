"""One block of the decoder.

    h = h + canonO( mixer( canonA( norm(h) ) ) )    Canon-B lives inside the mixer, on its projections
    h = h + canonM( mlp(   canonC( norm(h) ) ) )    Canon-D lives inside the MLP, before the nonlinearity

A Canon layer exists if the configuration has its site.
"""

from typing import cast

from torch import Tensor
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from canonlm.canon.layer import CanonLayer
from canonlm.canon.variants import make_canon
from canonlm.models.apply_canon import run_normed, run_site
from canonlm.models.cache import Layout, fill_unused_states
from canonlm.models.config import CanonLMConfig
from canonlm.models.mixers import MIXERS
from canonlm.models.mlp import build_mlp
from canonlm.models.norm import RMSNorm


class DecoderLayer(GradientCheckpointingLayer):
    """One block of the decoder."""

    def __init__(self, config: CanonLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.sites = layer_idx, config.sites(layer_idx)
        mixer = MIXERS[config.mixer(layer_idx)]
        self.mixer_name = mixer.attribute
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.add_module(self.mixer_name, mixer(config, layer_idx))
        self.mlp = build_mlp(config, layer_idx)
        if self.mlp is not None:
            self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for site in "AOCM":
            if (variant := config.canon(layer_idx, site)) is not None:
                self.add_module(f"canon{site}", make_canon(variant, config.hidden_size))

    def forward(
        self,
        h_BTD: Tensor,
        layout: Layout,
        attention_mask: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the stream and, from experts in training, the loss that balances them."""
        router_loss = None
        h_BTD, x_BTD = self._normed("A", self.input_layernorm, h_BTD, None, layout, past_key_values)
        mixer = self.get_submodule(self.mixer_name)
        y_BTD, _ = mixer(x_BTD, layout, attention_mask, rotary, past_key_values, **kwargs)
        y_BTD = self._canon("O", y_BTD, layout, past_key_values)
        if self.mlp is not None:
            h_BTD, x_BTD = self._normed("C", self.post_attention_layernorm, h_BTD, y_BTD, layout, past_key_values)
            y_BTD, router_loss = self.mlp(x_BTD, layout, past_key_values)
            y_BTD = self._canon("M", y_BTD, layout, past_key_values)
        h_BTD = h_BTD + y_BTD
        fill_unused_states(past_key_values, self.layer_idx, len(self.sites), h_BTD)
        return h_BTD, router_loss

    def _normed(
        self, site: str, norm: RMSNorm, h_BTD: Tensor, y_BTD: Tensor | None, layout: Layout, cache: Cache | None
    ) -> tuple[Tensor, Tensor]:
        """The stream with `y` added, and canon(norm(it)), which the mixer or the MLP reads."""
        if site in self.sites:
            canon, state_idx = self.get_submodule(f"canon{site}"), self.sites.index(site)
            both = run_normed(canon, norm, h_BTD, y_BTD, layout, cache, self.layer_idx, state_idx)
            if both is not None:
                return both
        h_BTD = h_BTD if y_BTD is None else h_BTD + y_BTD
        return h_BTD, self._canon(site, norm(h_BTD), layout, cache)

    def _canon(self, site: str, x_BTD: Tensor, layout: Layout, cache: Cache | None) -> Tensor:
        if site not in self.sites:
            return x_BTD
        canon = cast(CanonLayer, self.get_submodule(f"canon{site}"))
        return run_site([canon], [x_BTD], layout, cache, self.layer_idx, self.sites.index(site))[0]

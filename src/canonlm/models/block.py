"""One block of the decoder.

    h = h + canonO( mixer( canonA( norm(h) ) ) )    Canon-B lives inside the mixer, on its projections
    h = h + canonM( mlp(   canonC( norm(h) ) ) )    Canon-D lives inside the MLP, before the nonlinearity

With `attention_residuals`, mixer and MLP read a mean of all outputs before them in place of the sum h, and a block
returns the MLP's output (`canonlm.models.attention_residuals`).

A Canon layer exists if the configuration has its site. Sites that are not inside a part are applied here, wherever the
table `SITES` has them.
"""

from torch import Tensor
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from canonlm.canon.sites import SITES
from canonlm.canon.variants import make_canon
from canonlm.models.apply_canon import Slot, run_normed, run_site
from canonlm.models.attention_residuals import AttentionResidual, Output, output_of
from canonlm.models.cache import Layout, fill_unused_states
from canonlm.models.config import CanonLMConfig
from canonlm.models.mixers import MIXERS
from canonlm.models.mlp import build_mlp
from canonlm.models.norm import RMSNorm
from canonlm.models.show import shown


class DecoderLayer(GradientCheckpointingLayer):
    """One block of the decoder."""

    def __init__(self, config: CanonLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.sites = layer_idx, config.sites(layer_idx)
        mixer = MIXERS[config.mixers[layer_idx]]
        self.mixer_name = mixer.attribute
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.add_module(self.mixer_name, mixer(config, layer_idx))
        self.hands_on: bool = self.get_submodule(self.mixer_name).hands_on  # type: ignore[assignment]
        self.mlp = build_mlp(config, layer_idx)
        if self.mlp is not None:
            self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixes, self.eps = config.attention_residuals, config.rms_norm_eps
        if self.mixes and layer_idx:  # the first mixer reads the embedding alone
            self.mixer_residual = AttentionResidual(config.hidden_size)
        if self.mixes and self.mlp is not None:
            self.mlp_residual = AttentionResidual(config.hidden_size)
        self.canons: dict[tuple[str, str], list[str]] = {}  # letters by part and side
        for letter, variant in config.canons(layer_idx).items():
            site = SITES[letter]
            if site.part != "model" and site.side != "inside":
                self.add_module(f"canon{letter}", make_canon(variant, config.hidden_size))
                self.canons.setdefault((site.part, site.side), []).append(letter)

    def forward(
        self,
        h_BTD: Tensor,
        layout: Layout,
        attention_mask: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        outputs: tuple[Output, ...] = (),
        first: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None, tuple[Output, ...], Tensor | None]:
        """Returns the stream, from experts in training the loss that balances them, with attention residuals
        `outputs`, all that came before, and this block's, and `first`, or what the first such mixer handed on."""
        router_loss = None
        if self.mixes and self.layer_idx:
            h_BTD = self.mixer_residual(outputs)
        h_BTD = self._canon("block", "input", h_BTD, layout, cache)
        h_BTD, x_BTD = self._normed("mixer", self.input_layernorm, h_BTD, None, layout, cache)
        mixer = self.get_submodule(self.mixer_name)
        handed = {"first": first} if self.hands_on else {}
        y_BTD, second = mixer(x_BTD, layout, attention_mask, rotary, cache, **kwargs, **handed)
        first = second if self.hands_on and first is None else first
        y_BTD = self._canon("mixer", "output", y_BTD, layout, cache)
        if self.mlp is not None:
            added: Tensor | None = y_BTD
            if self.mixes:
                outputs = (*outputs, output_of(y_BTD, self.eps))
                h_BTD, added = self.mlp_residual(outputs), None
            h_BTD, x_BTD = self._normed("mlp", self.post_attention_layernorm, h_BTD, added, layout, cache)
            y_BTD, router_loss = self.mlp(x_BTD, layout, cache)
            y_BTD = self._canon("mlp", "output", y_BTD, layout, cache)
        h_BTD = self._canon("block", "output", y_BTD if self.mixes else h_BTD + y_BTD, layout, cache)
        fill_unused_states(cache, self.layer_idx, len(self.sites), h_BTD)
        return h_BTD, router_loss, (*outputs, output_of(h_BTD, self.eps)) if self.mixes else (), first

    def __repr__(self) -> str:
        def canons(part: str, side: str) -> list[str]:
            return [f"canon{letter}" for letter in self.canons.get((part, side), [])]

        parts = (("mixer", "input_layernorm", self.mixer_name), ("mlp", "post_attention_layernorm", "mlp"))
        names = [
            [f"{part}_residual", norm, *canons(part, "input"), name, *canons(part, "output")]
            for part, norm, name in parts
        ]
        return shown(self, [*canons("block", "input"), *names[0], *names[1], *canons("block", "output")])

    def _normed(
        self, part: str, norm: RMSNorm, h_BTD: Tensor, y_BTD: Tensor | None, layout: Layout, cache: Cache | None
    ) -> tuple[Tensor, Tensor]:
        """The stream with `y` added, and canon(norm(it)), which the mixer or the MLP reads."""
        if len(letters := self.canons.get((part, "input"), [])) == 1:
            slot = Slot(layout, cache, self.layer_idx, self.sites.index(SITES[letters[0]].slot))
            return run_normed(self.get_submodule(f"canon{letters[0]}"), norm, h_BTD, y_BTD, slot)
        h_BTD = h_BTD if y_BTD is None else h_BTD + y_BTD
        return h_BTD, self._canon(part, "input", norm(h_BTD), layout, cache)

    def _canon(self, part: str, side: str, x_BTD: Tensor, layout: Layout, cache: Cache | None) -> Tensor:
        for letter in self.canons.get((part, side), []):
            slot = Slot(layout, cache, self.layer_idx, self.sites.index(SITES[letter].slot))
            [x_BTD] = run_site([self.get_submodule(f"canon{letter}")], [x_BTD], slot)
        return x_BTD

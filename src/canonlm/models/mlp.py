"""The MLPs of a layer: gated, standard, or a mixture of experts."""

import math

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.activations import ACT2FN

from canonlm.canon.sites import OF_MLP
from canonlm.canon.variants import make_canon
from canonlm.models.apply_canon import Slot, run_gated, run_site
from canonlm.models.cache import Layout
from canonlm.models.config import CanonLMConfig
from canonlm.models.show import by_projection
from canonlm.ops.autocast import without_autocast
from canonlm.ops.compiled import readable
from canonlm.ops.derivatives import by_definition


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), or without a gate down(act(up(x))); Canon-D comes before the nonlinearity."""

    def __init__(self, config: CanonLMConfig, layer_idx: int) -> None:
        super().__init__()
        hidden, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.layer_idx, self.names = layer_idx, ("gate", "up") if config.mlp == "gated" else ("up",)
        for name in self.names:
            self.add_module(f"{name}_proj", nn.Linear(hidden, width, bias=bias))
        self.down_proj = nn.Linear(width, hidden, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]
        self.state_idx = config.sites(layer_idx).find(OF_MLP)
        if (variant := config.canons(layer_idx).get(OF_MLP)) is not None:
            for name in self.names:
                self.add_module(f"canon{OF_MLP}_{name}", make_canon(variant, width))

    __repr__ = by_projection

    def forward(self, x_BTD: Tensor, layout: Layout, cache: Cache | None = None) -> tuple[Tensor, None]:
        xs = [self.get_submodule(f"{name}_proj")(x_BTD) for name in self.names]
        if self.state_idx >= 0:
            canons = [self.get_submodule(f"canon{OF_MLP}_{name}") for name in self.names]
            slot = Slot(layout, cache, self.layer_idx, self.state_idx)
            if len(xs) == 2:
                return self.down_proj(run_gated(canons, self.act_fn, xs[0], xs[1], slot)), None
            xs = run_site(canons, xs, slot)
        y = self.act_fn(xs[0]) if len(xs) == 1 else self.act_fn(xs[0]) * xs[1]
        return self.down_proj(y), None


class Experts(nn.Module):
    """E gated MLPs side by side: `[E, tokens, D]` in and out."""

    def __init__(self, config: CanonLMConfig) -> None:
        super().__init__()
        experts, hidden, width = config.num_experts, config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.up_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x_ECD: Tensor) -> Tensor:
        return (self.act_fn(x_ECD @ self.gate_proj.mT) * (x_ECD @ self.up_proj.mT)) @ self.down_proj.mT


class Router(nn.Linear):
    """Logits of the experts, in at least float32, under autocast too: in bfloat16, ties choose wrong experts."""

    def forward(self, x_ND: Tensor) -> Tensor:
        compute = torch.promote_types(x_ND.dtype, torch.float32)
        with without_autocast(x_ND):
            return nn.functional.linear(x_ND.to(compute), self.weight.to(compute))


class MoE(nn.Module):
    """p_e(x) * expert_e(x), where e is the most likely of E experts under p = softmax(router(x)): the Switch
    Transformer (arXiv 2101.03961, Eq. 1-2).

    In training an expert takes the first ceil(expert_capacity * tokens / E) of the tokens that choose it, row after row
    of the batch; the others get zeros. In evaluation it takes all of them: decoding equals one call on all tokens only
    if a token's output does not depend on its neighbours. Padding gets zeros and takes no place.
    """

    def __init__(self, config: CanonLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.num_experts, self.capacity_factor = config.num_experts, config.expert_capacity
        self.router = Router(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, x_BTD: Tensor, layout: Layout, cache: Cache | None = None) -> tuple[Tensor, Tensor | None]:
        """In training, also returns the loss that balances the experts: E * sum_e f_e * P_e (Eq. 4-6), with f_e the
        share of tokens that choose expert e and P_e its mean probability; 1 if all are equal."""
        x_ND, mask = x_BTD.flatten(0, 1), layout.attention_mask
        # Called as a module: hooks (offloading) and adapters (LoRA) are put around it.
        p_NE = self.router(x_ND).softmax(-1)
        p_N, choice_N = p_NE.max(-1)
        real_N = x_ND.new_ones(x_ND.shape[0], dtype=torch.bool) if mask is None else mask.flatten() != 0
        chosen_NE = (choice_N[:, None] == torch.arange(self.num_experts, device=x_ND.device)) & real_N[:, None]
        tokens, tokens_per_expert_E = real_N.sum(), chosen_NE.sum(0)
        # Places per expert: a Python number, as shapes need one. The capacity, a tensor on the device, may be lower.
        if self.training:
            places = math.ceil(self.capacity_factor * x_ND.shape[0] / self.num_experts)
            capacity = (self.capacity_factor * tokens.double() / self.num_experts).ceil()
        else:
            capacity = tokens_per_expert_E.max()
            known = readable(x_ND) and not by_definition()
            places = int(capacity) if known else x_ND.shape[0]
        queue_N = chosen_NE.cumsum(0).gather(1, choice_N[:, None])[:, 0] - 1
        # One slot more than there are places: for the tokens that no expert takes.
        slot_N = torch.where(real_N & (queue_N < capacity), choice_N * places + queue_N, self.num_experts * places)
        x_SD = x_ND.new_zeros(self.num_experts * places + 1, x_ND.shape[1]).index_copy(0, slot_N, x_ND)
        y_ECD = self.experts(x_SD[:-1].unflatten(0, (self.num_experts, places)))
        y_ND = nn.functional.pad(y_ECD.flatten(0, 1), (0, 0, 0, 1)).index_select(0, slot_N)
        y_BTD = (y_ND * p_N[:, None]).to(y_ND.dtype).view_as(x_BTD)
        if not self.training:
            return y_BTD, None
        p_E = (p_NE * real_N[:, None]).sum(0)
        return y_BTD, self.num_experts * (tokens_per_expert_E * p_E).sum() / tokens.clamp(min=1) ** 2


def build_mlp(config: CanonLMConfig, layer_idx: int) -> nn.Module | None:
    """The MLP of a layer: called with (x, layout, cache) it returns (y, router loss or None)."""
    if config.mlp == "none":
        return None
    return MoE(config, layer_idx) if config.mlp == "moe" else MLP(config, layer_idx)

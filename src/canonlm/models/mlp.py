"""The gated MLP, with Canon-D on its two projections."""

from torch import Tensor, nn
from transformers import Cache
from transformers.activations import ACT2FN

from canonlm.canon import CanonLayer
from canonlm.models.cache import Layout, run_site
from canonlm.models.config import CanonLMConfig


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)); Canon-D comes before the nonlinearity."""

    def __init__(self, config: CanonLMConfig, layer_idx: int) -> None:
        super().__init__()
        hidden, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.layer_idx = layer_idx
        self.gate_proj = nn.Linear(hidden, width, bias=bias)
        self.up_proj = nn.Linear(hidden, width, bias=bias)
        self.down_proj = nn.Linear(width, hidden, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]
        self.state_idx = config.sites(layer_idx).find("D")
        if self.state_idx >= 0:
            self.canonD_gate = CanonLayer(width, **config.canon_kwargs)
            self.canonD_up = CanonLayer(width, **config.canon_kwargs)

    def forward(self, x_BTD: Tensor, layout: Layout, past_key_values: Cache | None = None) -> Tensor:
        gate, up = self.gate_proj(x_BTD), self.up_proj(x_BTD)
        if self.state_idx >= 0:
            canons = (self.canonD_gate, self.canonD_up)
            gate, up = run_site(canons, (gate, up), layout, past_key_values, self.layer_idx, self.state_idx)
        return self.down_proj(self.act_fn(gate) * up)

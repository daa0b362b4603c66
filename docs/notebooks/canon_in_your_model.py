# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # Canon in your model
#
# A Canon layer lets every token look at the three before it. This notebook puts one into a small PyTorch model, and
# then into a model of transformers. Each model is trained on associative recall: it reads pairs of a key and a
# value, then each key again, and has to say its value.
#
# Attention in one layer finds equal tokens. It cannot find what *follows* an equal token, as that takes two steps:
# look up the key, then look one token further. With a Canon layer, each token already contains its predecessor.

# %%
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import canonlm
from canonlm import CanonLayer, tasks
from canonlm.canonize import check

# %% tags=["parameters"]
STEPS = 300

# %%
task = tasks.get("mqar", pairs=4, keys=16, values=16)
print(task.vocab.show(task.sample("train", seed=0, index=0)))

# %% [markdown]
# ## A PyTorch model
#
# One layer of attention, no positions. `CanonLayer` takes and returns `[batch, time, channels]`.


# %%
class Model(nn.Module):
    def __init__(self, vocab_size, width=64, heads=4, canon=True):
        super().__init__()
        self.heads = heads
        self.embed, self.norm = nn.Embedding(vocab_size, width), nn.LayerNorm(width)
        self.canon = CanonLayer(width) if canon else nn.Identity()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        qkv = self.qkv(self.canon(self.norm(x)))
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


# %% [markdown]
# `task.dataset` returns windows of token ids. With `shifted=True`, `labels[t]` is the target of position t, or −100
# where there is no target.


# %%
def data(split, windows, **options):
    return DataLoader(task.dataset(split, seed=0, seq_len=96, count=windows, **options), batch_size=16)


def accuracy(logits_of, **options):
    right = total = 0
    for batch in data("test", 64, shifted=True, **options):
        right += int((logits_of(batch).argmax(-1) == batch["labels"]).sum())
        total += int((batch["labels"] != -100).sum())
    return right / total


for canon in (False, True):
    torch.manual_seed(0)
    model = Model(len(task.vocab), canon=canon)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in data("train", 16 * STEPS, shifted=True):
        logits = model(batch["input_ids"])
        loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = accuracy(lambda batch, model=model: model(batch["input_ids"]))
    print(f"{'with' if canon else 'without'} Canon: loss {loss.item():.3f}, {right:.1%} of the answers right")

# %% [markdown]
# ## A model of transformers
#
# `canonize` puts Canon layers into a decoder of transformers, in place. "A" is the input of attention, "C" that of
# the MLP. All layers start as the identity, so a trained model answers as before. The model stays a model of
# transformers: it generates, saves and loads as it did.

# %%
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(task.vocab), use_cache=False, **sizes))
for place in canonlm.describe(model, "AC"):
    print(place)
canonlm.canonize(model, "AC")

# %% [markdown]
# Models of transformers shift labels by themselves, so without `shifted` the loss is `model(**batch).loss`. Here
# `position_ids` that restart keep the instances of a window apart; transformers uses them only without a cache, hence
# `use_cache=False` above.

# %%
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for batch in data("train", 16 * STEPS, isolate_documents=True):
    loss = model(**batch).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()


def logits_of(batch):
    return model(batch["input_ids"], position_ids=batch["position_ids"]).logits


with torch.no_grad():
    right = accuracy(logits_of, isolate_documents=True)
print(f"canonized Llama: loss {loss.item():.3f}, {right:.1%} of the answers right")

# %% [markdown]
# Does it give the same output with a cache, in a batch, and padded? Is it the same model after saving and loading?

# %%
for outcome in check.decoding(model, ["greedy", "batch", "left padding", "right padding"]):
    print(outcome)

model.save_pretrained("canonized")
loaded = AutoModelForCausalLM.from_pretrained("canonized").eval()
prompt = batch["input_ids"][:1, :11]
assert torch.equal(loaded(prompt).logits, model(prompt).logits)

# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # Your task in your training loop
#
# A task is one function: it draws an instance and marks what is to be answered. This notebook writes one, trains a
# recurrent network on it in plain PyTorch, and grades the answers by difficulty.

# %%
from collections import Counter

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from canonlm.tasks import Answer, task

# %% tags=["parameters"]
STEPS = 100

# %% [markdown]
# ## The task
#
# The model reads digits and must say which is the largest. All randomness comes from `rng`; `test` is true for test
# samples, which here come in three sizes. `Answer` marks the token that is graded, and the slice in which it
# counts. Chance is the score of the best guess without reading the digits: always 9.


# %%
@task(
    vocab=[*"0123456789", "ans"],
    max_len=lambda settings: settings.digits + 2,
    chance=lambda where: 1 - 0.9 ** where["digits"],
    slices=lambda settings: {"digits": [2, 4, settings.digits]},
)
def largest(rng, test, *, digits: int = 8):
    """The model reads digits and must say which is the largest."""
    n = rng.choice([2, 4, digits]) if test else rng.randint(1, digits)
    row = rng.choices("0123456789", k=n)
    return [*row, "ans", Answer(max(row), digits=n)]


own = largest(digits=8)
for index in range(3):
    print(own.vocab.show(own.sample("test", seed=0, index=index)))

# %% [markdown]
# ## The loop
#
# `dataset` fills windows of 64 tokens with instances, one after the other. With `shifted=True`, `labels[t]` is the
# target of position t, or −100 where there is none. Window i is a pure function of split, seed and i.


# %%
class Network(nn.Module):
    def __init__(self, vocab_size, width=64):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(vocab_size, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids):
        return self.head(self.rnn(self.embed(input_ids))[0])


torch.manual_seed(0)
model = Network(len(own.vocab))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
windows = own.dataset("train", seed=0, seq_len=64, count=32 * STEPS, shifted=True)
for step, batch in enumerate(DataLoader(windows, batch_size=32), start=1):
    loss = cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

# %% [markdown]
# ## The grade
#
# `instances` are the complete instances of a window, and `grade` takes what the model wrote at each position of
# one. It gives a verdict for each answer, with its slice and, where the answer is wrong, why.

# %%
right, asked, mistakes = Counter(), Counter(), []
for index in range(100):
    instances = own.instances("test", 0, index, 64)
    window = torch.from_numpy(own.windows("test", 0, index, 1, seq_len=64).input_ids).long()
    with torch.no_grad():
        written = model(window).argmax(-1)[0].roll(1).tolist()  # position t is predicted at t − 1
    for instance in instances:
        for verdict in own.grade(instance.sample, written[instance.start : instance.stop]):
            right[verdict.slice["digits"]] += verdict.correct
            asked[verdict.slice["digits"]] += 1
            mistakes += [] if verdict.correct else [f"{own.vocab.show(instance.sample)}: {verdict.why}"]
for where in own.slices():
    n = where["digits"]
    print(f"{n} digits: {right[n] / asked[n]:.1%} of {asked[n]} right; guessing scores {own.chance(where):.1%}")
print("\n".join(mistakes[:3]))

# %% [markdown]
# ## The same task everywhere else
#
# With the function in a file `mine.py`, every command can use it:
#
# ```sh
# canonlm data show mine.py:largest
# canonlm play mine.py:largest --arch llama,gla5,mamba2 --seeds 3
# ```

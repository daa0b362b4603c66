# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # From runs to a figure
#
# This notebook trains two architectures with three seeds each, reads their measurements into a data frame, and
# draws a figure for a paper. If you have runs already, begin at "The data frame".

# %%
import polars as pl
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

import canonlm
from canonlm.cli import main

# %% tags=["parameters"]
STEPS = 400
SEEDS = 3

# %%
main([
    "play", "copying", "--arch", "llama,llama+canon", "--seeds", str(SEEDS), "--out", "runs/figure",
    f"train.steps={STEPS}", f"train.eval_every={max(1, STEPS // 10)}", "task.N=8", "task.min_items=2",
])  # fmt: skip

# %% [markdown]
# ## The data frame
#
# One row is one measurement. `kind` separates training steps, evaluations during training and final results.

# %%
runs = canonlm.load_runs("runs/figure")
print(runs.group_by("kind", "metric").len().sort("kind", "metric"))

# %% [markdown]
# ## A table
#
# Accuracies of slice `all` are what reports compare. Three seeds say little about the next one, so show all of
# them.

# %%
accuracy = runs.filter(pl.col("metric") == "accuracy", pl.col("slice") == "all")
final = accuracy.filter(pl.col("kind") == "final")
best = (  # of the learning rates that were tried, the one with the highest mean
    final.group_by("arch", "lr").agg(pl.col("value").mean()).sort("value", descending=True).unique("arch", keep="first")
)
final = final.join(best.select("arch", "lr"), on=["arch", "lr"])
table = final.group_by("arch", "lr").agg(pl.col("value").mean().alias("mean"), pl.col("value").sort().alias("seeds"))
print(table.sort("arch"))

# %% [markdown]
# ## A figure
#
# Thin lines are seeds, thick lines their means.

# %%
curves = accuracy.filter(pl.col("kind") == "evaluation").join(best.select("arch", "lr"), on=["arch", "lr"])
colors = {"llama": "#c44e52", "llama+canon": "#4c72b0"}
figure = Figure(figsize=(4.8, 3.2), layout="constrained")
axes = figure.subplots()
for (arch,), group in curves.sort("arch", "step").group_by("arch", maintain_order=True):
    for _, run in group.group_by("run", maintain_order=True):
        axes.plot(run["step"], run["value"], color=colors[arch], linewidth=1, alpha=0.4)
    mean = group.group_by("step", maintain_order=True).agg(pl.col("value").mean())
    axes.plot(mean["step"], mean["value"], color=colors[arch], linewidth=2.5, label=arch)
axes.set(xlabel="step", ylabel="accuracy")
axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
figure.savefig("figure.pdf")
curves.select("arch", "seed", "step", "value").write_csv("figure.csv")  # the points, for pgfplots and others
figure

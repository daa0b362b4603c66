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
import plotly.graph_objects as go
import polars as pl

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
figure = go.Figure()
for (arch,), group in curves.sort("arch", "step").group_by("arch", maintain_order=True):
    for _, run in group.group_by("run", maintain_order=True):
        thin = {"color": colors[arch], "width": 1}
        figure.add_scatter(x=run["step"], y=run["value"], mode="lines", line=thin, opacity=0.4, showlegend=False)
    mean = group.group_by("step", maintain_order=True).agg(pl.col("value").mean())
    thick = {"color": colors[arch], "width": 3}
    figure.add_scatter(x=mean["step"], y=mean["value"], mode="lines", line=thick, name=arch)
figure.update_layout(
    template="simple_white", width=480, height=320, font={"family": "serif", "size": 14},
    xaxis_title="step", yaxis_title="accuracy", yaxis_tickformat=".0%",
    legend={"x": 1, "y": 0.5, "xanchor": "right"}, margin={"l": 60, "r": 10, "t": 10, "b": 50},
)  # fmt: skip
figure.write_html("figure.html")  # with `pip install kaleido`: figure.write_image("figure.pdf")
curves.select("arch", "seed", "step", "value").write_csv("figure.csv")  # the points, for pgfplots and others

"""`canonlm plan`: numbers checked by hand, and one line for impossible settings."""

import re
from contextlib import nullcontext

import pytest

from canonlm.cli import main
from canonlm.core import limits
from canonlm.launch.plan import cost, make_plan
from canonlm.launch.recipes import find, load_preset
from canonlm.train.build import build_model, check_fits
from canonlm.train.config import resolve
from canonlm.train.load_config import load

QUICK = "train.compile=false"  # the compiler's partition takes seconds
SHALLOW = "model.num_hidden_layers=3"


def numbers(output):
    """The rows that are not part of another row."""
    return dict(line.split(maxsplit=1) for line in output.splitlines()[1:] if not line.startswith("    "))


def gib(text):
    number, unit = text.split()
    return float(number.replace(",", "")) / {"GiB": 1, "MiB": 1024}[unit]


def test_a_published_run(capsys):
    name = "Llama-1B-Nemo-1T-lr0.002"
    assert main(["plan", name, "--gpus", "128", "--gpu", "h200", QUICK]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{name} on 128 x h200\n")
    rows = numbers(output)
    assert rows["parameters"] == "1,364,396,032"
    assert rows["tokens"] == "1,006,632,960,000  (240,000 steps of 1,024 windows of 4,096)"
    # 6 per weight outside the embedding, and attention: 12 * layers * width * T / 2.
    per_token = 6 * (1_364_396_032 - 32000 * 2048 - 2048 * (4 * 24 + 1)) + 12 * 24 * 2048 * 4096 / 2
    assert f"{per_token:.3e} per token" in rows["FLOPs"]
    assert f"{per_token * 1_006_632_960_000:.3e} " in rows["FLOPs"]
    days = per_token * 1_006_632_960_000 / (128 * 989e12 * 0.4) / 86400
    assert rows["time"] == f"{days:.1f} days at 40% of 989 TFLOP/s"
    assert "slow width" not in rows
    assert rows["state"] == "1.6 GB for a sequence of 4,096 tokens  (393 kB per token)"  # 24 layers, 2 x 2048 x 4 bytes
    assert rows["windows"] in ("8 per GPU, 8 at a time", "8 per GPU, 4 at a time, 2 times")
    total, usable = (gib(text) for text in rows["memory"].removesuffix(" per GPU").split(" of "))
    assert total <= usable == 126.9
    parts = {line.split()[0]: gib(" ".join(line.split()[1:])) for line in output.splitlines() if line[:4] == "    "}
    assert sum(parts.values()) == pytest.approx(total, abs=0.2)
    assert parts["optimizer"] == pytest.approx(8 * 1_364_396_032 / 128 / 2**30, abs=0.01)


def test_what_a_step_sends():
    """By hand, for a Llama on 128 GPUs: FSDP gathers blocks twice and the rest once, in bfloat16."""
    run = load(find("Llama-1B-Nemo-1T-lr0.002"), [QUICK, SHALLOW])
    plan = make_plan(run, 128, "h100")
    ends = 2 * 32000 * 2048 + 2048
    blocks, others = plan.parameters - ends, 127 / 128
    assert plan.traffic.gathers == pytest.approx(plan.accumulation * 2 * (2 * blocks + ends) * others)
    assert plan.traffic.reductions == pytest.approx(plan.accumulation * 4 * plan.parameters * others)
    assert plan.traffic.copies == plan.traffic.tensor_parallel == 0
    total = plan.traffic.total
    assert plan.sending == pytest.approx(total / 400e9)  # eight links of 50 GB/s a machine, less than NVLink
    assert make_plan(run, 8, "h200").sending == pytest.approx(make_plan(run, 8, "h200").traffic.total / 450e9)
    slow = make_plan(run, 128, "h100", network=0.1)
    assert slow.sending > slow.computing == plan.computing
    assert slow.days == pytest.approx(240_000 * slow.sending / 86400)
    copies = make_plan(
        load(find("Llama-1B-Nemo-1T-lr0.002"), [QUICK, SHALLOW, "parallel.dp_replicate=16"]), 128, "h100"
    )
    assert copies.traffic.copies == pytest.approx(4 * plan.parameters / 8 * 2 * 15 / 16)
    within = (copies.traffic.gathers + copies.traffic.reductions) / 450e9
    assert copies.sending == pytest.approx(within + copies.traffic.copies / 50e9)  # a GPU's own link


def test_what_a_step_sends_with_context_parallelism():
    """By hand: queries, keys, values and outputs of attention, forward and backward."""
    layouts = ["parallel.micro_batch_size=2"], ["parallel.micro_batch_size=8", "parallel.cp=4"]
    run, shared = (load(find("Llama-1B-Nemo-1T-lr0.002"), [QUICK, SHALLOW, *layout]) for layout in layouts)
    whole, part = make_plan(run, 32, "h100"), make_plan(shared, 32, "h100")
    assert part.windows == 4 * whole.windows
    assert (part.memory, part.flops, part.computing) == (whole.memory, whole.flops, whole.computing)
    tokens = run.train.batch_size * run.data.seq_len // 32
    assert part.traffic.context_parallel == pytest.approx(2 * 3 * 4 * 2048 * tokens * 2 * 3 / 4)
    assert part.sending == pytest.approx(whole.sending + part.traffic.context_parallel / 450e9)


def test_a_part_of_one_window_is_sent_too():
    """With fewer windows in a batch than devices, each has a part of a window."""
    layout = ["parallel.tp=2", "parallel.cp=4"]
    sent = [
        make_plan(
            load(find("Llama-1B-Nemo-1T-lr0.002"), [QUICK, SHALLOW, *layout, f"train.batch_size={size}"]), 16, "h100"
        )
        for size in (2, 8)
    ]
    for kind in ("tensor_parallel", "context_parallel"):
        one, four = (getattr(plan.traffic, kind) for plan in sent)
        assert four == 4 * one > 0


@pytest.mark.parametrize("tp", [1, 2])
def test_frozen_parameters_have_no_gradients(tp, monkeypatch):
    """Only the Canon layers of a Llama train."""
    changes = [QUICK, SHALLOW, "train.device=cpu", "train.batch_size=8", f"parallel.tp={tp}"]
    run = load(find("LlamaCanon-1B-Nemo-1T-lr0.002"), [*changes, 'train.freeze=["*", "!*canon*"]'])
    model = build_model(run, "meta")
    trained = sum(p.numel() for name, p in model.module.named_parameters() if "canon" in name)
    assert 0 < trained < model.num_parameters / 1000
    plan = make_plan(run, 8, "h100")
    assert plan.memory.parameters >= 4 * model.num_parameters / 8
    for parts, sent in ((plan.memory.gradients, 4), (plan.memory.optimizer, 8), (plan.traffic.reductions, 4 * 7)):
        assert 0 < parts <= 1.001 * sent * trained / 8 * tp
    needed = 4 * model.num_parameters + 12 * trained
    for memory, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(limits, "memory_of", lambda device, memory=memory: memory)
        with nullcontext() if fits else pytest.raises(ValueError, match="model: needs at least"):
            check_fits(run.model_copy(update={"data": run.data.model_copy(update={"seq_len": 1})}), model, "cpu")


def test_several_numbers_of_gpus(capsys):
    name = "LlamaCanon-8B-Nemo-1T-lr0.003"
    assert main(["plan", name, "--gpus", "2,8,64,8,1024", "--gpu", "a10", QUICK, SHALLOW]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("│")] == ["8", "64"]
    assert lines[-2].startswith("2 GPUs: memory: expected at most 21.6 GiB of a GPU (a10)")
    assert lines[-1].startswith("1,024 GPUs: train.batch_size: expected a multiple of 1024")
    assert main(["plan", name, "--gpus", "1000,1024", QUICK]) == 2
    assert capsys.readouterr().err == "canonlm: --gpus: none of 1000, 1024 is possible\n"


def test_a_task(capsys):
    """A block for each architecture, and the sum over all that `canonlm play` runs of it."""
    assert main(["plan", "copying", "--preset", "small", "--arch", "llama,gdn2", QUICK, "train.steps=100"]) == 0
    blocks = capsys.readouterr().out.split("\nall ")
    run = load_preset("copying", "small")
    tokens = 100 * run.run["train"]["batch_size"] * run.run["data"]["seq_len"]
    assert blocks[0].splitlines()[0] == "llama on copying, small on 1 x h100"
    assert "gdn2 on copying, small on 1 x h100" in blocks[0]
    assert f"\n  tokens          {tokens:,}  (100 steps" in blocks[0]
    tries = len(run.lrs) * run.seeds
    assert blocks[1].startswith(f"{2 * tries} runs, {len(run.lrs)} learning rates x {run.seeds} seeds for each arch")
    assert f"\n  tokens          {2 * tries * tokens:,}\n" in blocks[1]


def test_recurrences_of_transformers_count_in_part(capsys):
    """The plan says so, where there are some."""
    archs = "gdn2,hf:llama,hf:mamba2,hf:qwen3_next"
    assert main(["plan", "copying", "--arch", archs, QUICK, "train.precision=bf16"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  FLOPs")][:4]
    assert [row.endswith("projections and convolutions only") for row in rows] == [False, False, True, True]


def test_options_of_tasks_do_not_change_a_recipe(tmp_path, monkeypatch, assert_refused):
    monkeypatch.chdir(tmp_path)
    assert_refused(["plan", "debug", "--arch", "gdn2"], "--arch only works with a task; KEY=VALUE changes a recipe")
    assert_refused(["plan", "depoo", "--arch", "gdn2"], 'unknown recipe "depoo"')


@pytest.mark.parametrize("arch", ["gdn2", "gdn2.gdn2.llama", "llama+canon"])
def test_the_cost_of_many_runs(tiny, arch):
    """The sum of the plans of all runs."""
    model = {"num_hidden_layers": 3}
    runs = [tiny(arch=name, model=model, train={"seed": seed}) for name in ("llama", arch) for seed in range(50)]
    runs.append(tiny(data={"seq_len": 36}, train={"precision": "bf16"}))
    total = cost(runs, "a100-80", 0.25)
    plans = [make_plan(runs[0], 1, "a100-80", 0.25), make_plan(runs[-2], 1, "a100-80", 0.25)]
    last = make_plan(runs[-1], 1, "a100-80", 0.25)
    assert (total.runs, total.tokens) == (101, 50 * sum(plan.tokens for plan in plans) + last.tokens)
    assert total.flops == pytest.approx(50 * sum(plan.flops for plan in plans) + last.flops)
    assert total.hours == pytest.approx(24 * (50 * sum(plan.days for plan in plans) + last.days))
    with pytest.raises(ValueError, match=r"^--mfu: expected a number"):
        cost(runs, mfu=2)
    for network in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"^--network: expected a number > 0"):
            make_plan(runs[0], 1, "a100-80", network=network)


def test_the_largest_micro_batch_that_fits():
    run = load(find("Llama-1B-Nemo-1T-lr0.002"), [QUICK])
    plan = make_plan(run, 128, "a100-80")
    assert plan.windows == 8
    assert plan.micro_batch * plan.accumulation == 8
    assert plan.memory.total <= plan.usable
    smaller = make_plan(load(find("Llama-1B-Nemo-1T-lr0.002"), [QUICK, "parallel.micro_batch_size=1"]), 128, "a100-80")
    assert smaller.micro_batch == 1
    assert smaller.memory.activations * plan.micro_batch == pytest.approx(plan.memory.activations)
    doubled = load(find("Llama-1B-Nemo-1T-lr0.002"), [QUICK, f"parallel.micro_batch_size={2 * plan.micro_batch}"])
    with pytest.raises(ValueError, match=f"with {2 * plan.micro_batch} windows at a time"):
        make_plan(doubled, 128, "a100-80")


@pytest.mark.slow
def test_suggestions_when_it_does_not_fit(capsys):
    main(["plan", "Llama-8B-Nemo-1T-lr0.002", "--gpus", "1", QUICK])
    error = capsys.readouterr().err
    assert error.startswith("canonlm: memory: expected at most 72.0 GiB of a GPU (h100), got ")
    assert error.endswith("of it optimizer. Try more --gpus, or a larger --gpu\n")
    command = ["plan", "GLA5Canon-1B-Nemo-1T-lr0.002", "--gpus", "128", "--gpu", "l40s", QUICK]
    main(command)
    assert capsys.readouterr().err.endswith("of it activations. Try parallel.activation_checkpointing=full\n")
    assert main([*command, "parallel.activation_checkpointing=full"]) == 0


def test_bytes_of_state(capsys, tmp_path, monkeypatch):
    """Two layers of width 64: a state of 64 x 128 and 256 channels of convolutions, or keys and values."""
    assert main(["plan", "parity", "--arch", "gdn2,gdn2.llama", QUICK]) == 0
    rows = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("  state")]
    assert rows == [
        "74 kB for a sequence of 64 tokens  (74 kB fixed)",
        "70 kB for a sequence of 64 tokens  (37 kB fixed, 512 bytes per token)",
    ]
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["archs"]) == 0
    listed = capsys.readouterr().out
    assert re.search(r"^llama +6\.1 kB per token +Transformer", listed, re.M)
    assert re.search(r"^gla5-conv|^gla5 +836 kB +gated", listed, re.M)
    assert re.search(r"^\+canon +Canon", listed, re.M)


@pytest.mark.parametrize(("recomputation", "measured"), [("none", 20.92e9), ("selective", 15.55e9)])
def test_memory_is_that_of_the_kernels_of_a_gpu(recomputation, measured):
    """The peaks of an H200 (benchmarks/results/gpu/memory.json). PyTorch's form of Canon takes 1.6 times as much."""
    sizes = {"num_hidden_layers": 12, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 32000}
    sizes["fields"] = {"intermediate_size": 2730}
    other = {"precision": "bf16", "compile": False, "log_every": 4, "optim": {"lr": 1e-3}}
    settings = {
        "arch": "llama+canon",
        "model": sizes,
        "text": {"sources": {"tokens": {"path": "tokens"}}},
        "data": {"seq_len": 4096},
        "train": {"steps": 4, "batch_size": 8, "eval_every": 4, "eval_size": 1, "checkpoint_every": 4} | other,
        "parallel": {"activation_checkpointing": recomputation},
    }
    plan = make_plan(resolve(settings), 1, "h200")
    advice = "intermediate_size = 2,730 is not a multiple of 8, so a GPU is up to three times as slow at it as at 2,752"
    assert plan.width == advice
    assert (plan.windows, plan.micro_batch) == (8, 8)
    assert 0.95 <= plan.memory.total / measured <= 1.1

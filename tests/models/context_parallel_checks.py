"""Loss and gradients of context parallelism in 2, 4 and 8 processes, forks of one that has computed the same alone.

    python context_parallel_checks.py FOLDER SECONDS

The folder gets `results.json`, `{case: [error of the loss, of the gradients, the worst one's name]}`, and the output of
each process, which ends after this many seconds and then prints where it was.
"""

import faulthandler
import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from canonlm.models.build import build
from canonlm.models.interface import Sizes
from canonlm.models.mixers import MIXERS
from canonlm.ops.context_parallel import Span
from canonlm.ops.varlen import Documents

TIME, VOCABULARY = 32, 37
STARTS = [[0, 5, 16, 17, 27], [0, 9, 15, 24, 31], [0]]
"""Where the documents of each row begin. With cuts at 8, 16 and 24: two at a cut, two one token after one, one a token
before one; others go on across them."""

HYBRID = {"mixers": ["gdn", "attention"], "canon_sets": ["AbCD", "ABCD"], "tie_word_embeddings": True}
VARIANTS = {"canon_set": "E:smear,A:avg,Q:k3,K:offset,V:dynamic:scaled,OM:scaled,D:k2:id", "qk_norm": True}
BIASES = {"canon_set": "ABCD", "canon_bias": True, "canon_activation": True, "z_loss": "logsumexp", "rope_heads": 2}
SINKS = {"canon_set": "ABCD", "attention_sink": True, "sliding_window": 5, "attention_gate": True}
RESIDUALS = {"attention_residuals": True, "mixers": ["mamba3", "attention"], "canon_sets": ["B", "AC"]}
GROUPED = {"mixer_options": {"gla": {"num_heads": 4, "num_key_value_heads": 2, "key_head_dim": 4, "value_head_dim": 8}}}
MIMO = {"mixer_options": {"mamba3": {"num_heads": 4, "n_groups": 2, "mimo_rank": 2, "state_size": 8}}}
MORE = {"rwkv7": "rwkv7{value_residual=true}", "mla": "mla+canon"}
FIRST = [next(iter(mixer.architectures)) for mixer in MIXERS.values()]
MODELS: dict[str, tuple[str, dict]] = {
    **{arch: (arch, {}) for arch in ("llama+canon=ABCD", *(MORE.get(name, name) for name in FIRST))},
    "alibi": ("llama", {"alibi": "alibi", "rope_dim": 0}),
    "hybrid": ("llama", HYBRID),
    "variants": ("llama", VARIANTS),
    "biases": ("llama", BIASES),
    "sinks": ("llama", SINKS),
    "residuals": ("llama", RESIDUALS),
    "grouped": ("gla5", GROUPED),
    "mimo": ("mamba3", MIMO),
}  # fmt: skip
CASES = {
    f"{name}, {size} processes, {dtype}": (*MODELS[name], size, dtype)
    for size, dtype, names in (
        (2, "float64", ["llama+canon=ABCD", "gdn2", "variants"]),
        (4, "float64", list(MODELS)),
        (8, "float32", ["llama+canon=ABCD", "mamba2"]),
    )
    for name in names
}


def batch(documents: bool):
    generator = torch.Generator().manual_seed(0)
    ids, targets = (torch.randint(VOCABULARY, (len(STARTS), TIME), generator=generator) for _ in range(2))
    targets[1, :20] = -100  # the parts of a row have different numbers of targets
    doc_ids = torch.stack([sum((torch.arange(TIME) >= start).long() for start in starts) for starts in STARTS])
    return ids, targets, Documents(doc_ids) if documents else None


def model_of(arch, fields, size, dtype):
    torch.set_default_dtype(getattr(torch, dtype))
    sizes = Sizes(2, 8 * max(size, 4), 2 * max(size, 4), VOCABULARY, TIME, {"initializer_range": 0.3, **fields})
    model = build(arch, sizes, seed=1)
    model.check_context_parallel(size, 1)
    return model


def gradients(model):
    """The losses of the rows with and without documents, of windows that cannot be cut, and the gradients of all."""
    losses = []
    for documents, length in ((True, TIME), (False, TIME), (False, 7)):
        ids, targets, docs = batch(documents)
        losses.append(model.loss(ids[:, :length], targets[:, :length], docs, 50.0).total)
    sum(losses).backward()
    return torch.stack(losses).detach(), {name: p.grad for name, p in model.module.named_parameters()}


def compare(case, rank, alone, groups):
    model, (expected, theirs) = alone[case]
    *_, size, dtype = CASES[case]
    torch.set_default_dtype(getattr(torch, dtype))
    model.module.zero_grad()
    model.span = Span(rank, size, groups[size].group_name)
    losses, ours = gradients(model)
    errors = []
    for name, gradient in ours.items():
        dist.all_reduce(gradient, group=groups[size])
        scale = theirs[name].abs().max().clamp(min=1e-3)
        errors.append((float((gradient / size - theirs[name]).abs().max() / scale), name))
    return [float((losses - expected).abs().max()), *max(errors)]


def run(rank, folder, alone, seconds):
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.dump_traceback_later(seconds, exit=True)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 8), rank=rank, world_size=8)
    groups = {size: dist.new_group(range(size)) for size in (2, 4, 8)}
    results = {case: compare(case, rank, alone, groups) for case in CASES if rank < CASES[case][2]}
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    alone = {case: (model, gradients(model)) for case in CASES if (model := model_of(*CASES[case]))}
    gc.freeze()  # the children do not search for garbage in what is imported
    children = []
    for rank in range(8):
        if (child := os.fork()) == 0:
            sys.exit(run(rank, folder, alone, seconds))
        children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children))

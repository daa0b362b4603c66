"""Run folders with checkpoints, made without the training loop."""

import torch

from canonlm.core.distributed import World
from canonlm.core.files import write_text
from canonlm.train.build import build_model
from canonlm.train.checkpoint import Checkpoints
from canonlm.train.config import resolve

IDS = torch.arange(12)[None]
SIZES = {"vocab_size": 258, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TRAIN = {"steps": 2, "batch_size": 4, "eval_every": 9, "eval_size": 8, "checkpoint_every": 1, "optim": {"lr": 0.1}}
OF_TEXT = {
    "arch": "gla5+canon",
    "model": {**SIZES, "fields": {"bos_token_id": 256, "eos_token_id": 257}},
    "data": {"seq_len": 18},
    "train": TRAIN,
}
"""A run on text in bytes, without its sources."""

OF_COPYING = {
    "arch": "llama",
    "task": {"name": "copying", "N": 40},
    "model": {key: value for key, value in SIZES.items() if key != "vocab_size"},
    "data": {"seq_len": 128, "loss_on": "answer", "isolate_documents": False},
    "train": TRAIN,
}


def logits_of(model, ids=IDS):
    with torch.no_grad():
        return model.eval()(ids.to(model.device)).logits


def save_run(folder, raw, steps=(1, 2)):
    """A folder with these checkpoints of a model that learns `IDS`; returns its logits by step."""
    folder.mkdir(parents=True, exist_ok=True)
    run = resolve(raw)
    write_text(folder / "config.yaml", run.to_yaml())
    model, logits = build_model(run).module, {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpoints = Checkpoints(folder / "checkpoints", 9, None, World(torch.device("cpu")))
    ids = IDS % model.config.vocab_size
    for step in steps:
        model.train()(ids, labels=ids).loss.backward()
        optimizer.step()
        checkpoints.save(step, model, optimizer)
        logits[step] = logits_of(model, ids)
    checkpoints.close()
    return logits

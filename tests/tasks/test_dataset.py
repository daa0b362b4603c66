"""`task.dataset`: the windows of our own training, under both conventions of labels."""

import pytest
import torch
from refusals import refused
from torch.utils.data import DataLoader

from canonlm import CanonLMConfig, CanonLMForCausalLM, tasks
from canonlm.data.windows import batches
from canonlm.launch.recipes import load_preset
from canonlm.train.config import resolve
from canonlm.train.data import stream
from canonlm.train.load_config import merge

COPYING = tasks.get("copying", N=8, min_items=2)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("depo", {}), ("depo", {"isolate_documents": True}), ("mano", {"isolate_documents": True}), ("capo", {})],
)
def test_a_loader_gives_the_windows_of_a_run(name, changes):
    data = {**changes, "seq_len": 256}
    run = resolve(merge(load_preset(name, "tiny").run, {"arch": "llama", "data": data, "train": {"seed": 3}}))
    dataset = run.built_task.dataset("train", run.data_seed, 256, 12, loss_on=run.data.loss_on, shifted=True, **changes)
    theirs = list(DataLoader(dataset, batch_size=4))
    ours = list(batches(stream(run), 0, 3, 4, 0))
    assert len(theirs) == len(ours)
    for item, batch in zip(theirs, ours, strict=True):
        assert torch.equal(item["input_ids"], batch.input_ids)
        assert torch.equal(item["labels"], batch.targets)
        assert item["labels"].dtype == item["input_ids"].dtype == torch.int64
        assert ("position_ids" in item) == bool(changes)
        for row, documents in enumerate(batch.documents.ids if changes else ()):  # counted one by one
            positions, last = [], None
            for document in documents.tolist():
                positions.append(positions[-1] + 1 if document == last else 0)
                last = document
            assert item["position_ids"][row].tolist() == positions


@pytest.mark.parametrize("loss_on", ["answer", "all"])
def test_labels_are_the_inputs_and_the_model_shifts(loss_on):
    item = COPYING.dataset("test", 5, 60, 3, loss_on=loss_on)[2]
    window = COPYING.windows("test", 5, 2, 1, seq_len=60, loss_on=loss_on)
    assert item["input_ids"].tolist() == window.input_ids[0].tolist()
    assert item["labels"].tolist() == window.labels[0].tolist()
    shifted = COPYING.dataset("test", 5, 60, 3, loss_on=loss_on, shifted=True)[2]
    model = CanonLMForCausalLM(
        CanonLMConfig(vocab_size=len(COPYING.vocab), hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    output = model(**{key: value[None] for key, value in item.items()})
    by_hand = [
        -output.logits[0, t].log_softmax(-1)[target] for t, target in enumerate(shifted["labels"]) if target != -100
    ]
    torch.testing.assert_close(output.loss, torch.stack(by_hand).mean())


def test_position_ids_isolate():
    """With the items' position ids the model computes the same as with document ids."""
    dataset = COPYING.dataset("train", 0, 64, 2, isolate_documents=True)
    item = dataset[1]
    window = COPYING.windows("train", 0, 1, 1, seq_len=64)
    config = CanonLMConfig(
        vocab_size=len(COPYING.vocab), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, canon_set="ABCD"
    )
    model = CanonLMForCausalLM(config).eval()
    by_positions = model(item["input_ids"][None], position_ids=item["position_ids"][None]).logits
    by_documents = model(item["input_ids"][None], doc_ids=torch.from_numpy(window.doc_ids).long()).logits
    torch.testing.assert_close(by_positions, by_documents)
    assert not torch.allclose(by_positions, model(item["input_ids"][None]).logits)


def test_it_is_a_sequence():
    dataset = COPYING.dataset("train", 0, 32, 3)
    assert len(dataset) == len(list(dataset)) == 3
    assert torch.equal(dataset[-1]["input_ids"], dataset[2]["input_ids"])
    with pytest.raises(IndexError):
        dataset[3]
    other_order = DataLoader(dataset, sampler=[2, 0, 1], num_workers=1)
    assert [batch["input_ids"][0].tolist() for batch in other_order] == [
        dataset[i]["input_ids"].tolist() for i in (2, 0, 1)
    ]


def test_invalid_arguments():
    for arguments, line in (
        (("trian", 0, 32, 3), 'unknown split "trian". Did you mean "train"?'),
        (("train", -1, 32, 3), "seed: expected"),
        (("train", 0, 0, 3), "seq_len: expected"),
        (("train", 0, 32, 0), "count: expected an integer >= 1, got 0"),
    ):
        with refused(f"{line}..."):
            COPYING.dataset(*arguments)
    capo = tasks.get("capo", N=50)
    full = capo.training_windows(0, 128)
    assert (capo.dataset("train", 0, 128, full)[full - 1]["labels"] != -100).any()
    with pytest.raises(ValueError, match=rf"^count: expected 1 to {full}, the whole training stream"):
        capo.dataset("train", 0, 128, full + 1)
    with pytest.raises(ValueError, match=r"^isolate_documents: expected False, as in lano"):
        tasks.get("lano").dataset("train", 0, 128, 1, isolate_documents=True)

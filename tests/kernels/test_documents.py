"""One byte per token encodes how far a tap may reach."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from canonlm.ops.kernels.documents import last_real, reach_of


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_reach_counts_tokens_since_the_document_began(lengths):
    expected = [7] * lengths[0] + [min(7, t) for length in lengths[1:] for t in range(length)]
    doc_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    assert reach_of(doc_ids).tolist() == [expected]


def test_documents_numbered_in_any_way():
    assert reach_of(torch.tensor([[5, 5, 2, 2, 2, 9]])).tolist() == [[7, 7, 0, 1, 2, 0]]
    assert reach_of(torch.tensor([[0, 0], [0, 1]])).tolist() == [[7, 7], [7, 0]]


def test_padding_is_a_bit():
    mask = torch.tensor([[0, 1, 1, 0]])
    assert reach_of(None, mask).tolist() == [[15, 7, 7, 15]]
    assert reach_of(torch.tensor([[0, 0, 1, 1]]), mask).tolist() == [[15, 7, 0, 9]]
    assert reach_of(None, mask).dtype == torch.int8
    assert reach_of() is None


@pytest.mark.parametrize(("mask", "last"), [([1, 1, 0], 1), ([0, 0, 0], -1), ([0, 1, 1], 2)])
def test_last_real_token(mask, last):
    assert last_real(torch.tensor([mask])).tolist() == [last]

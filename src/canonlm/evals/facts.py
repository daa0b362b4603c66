"""How much does the model know about the people it has read about? Bits, and attributes said right."""

from typing import Any

import torch
from transformers import PreTrainedModel

from canonlm.evals.tally import Tally
from canonlm.evals.windows import window_loss
from canonlm.windows import WindowStream


class FactEval:
    """`size` people (at most all there are), each in a newly worded biography of its own.

    Bits stored from the loss on names and attribute values (`canonlm.tasks.capo.bits`); an attribute counts as known
    where every token of its value is the model's first choice given the true tokens before it.
    """

    def __init__(self, stream: WindowStream, size: int, batch_size: int) -> None:
        self.stream, self.task = stream, stream.task
        self.size, self.batch_size = size, batch_size

"""Prepared folders, written without the code that prepares them."""

import itertools
from pathlib import Path

import numpy as np

from canonlm.data import index


def write_prepared(folder: Path, splits, dtype="uint16", vocab_size=1000, bytes_per_token=2):
    """`splits`: {split: [shard, …]}; a shard is a list of documents, a document a list of tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    result = {}
    for split, shards in splits.items():
        result[split] = ()
        for number, documents in enumerate(shards):
            name, tokens = f"{split}-{number:05}.ds", [*itertools.chain(*documents)]
            (folder / name).write_bytes(np.array(tokens, np.dtype(dtype).newbyteorder("<")).tobytes())
            ends = np.cumsum([len(document) for document in documents], dtype="<u8")
            (folder / f"{name}.index").write_bytes(ends.tobytes())
            size = len(tokens) * bytes_per_token
            sums = [index.file_sha256(folder / file) for file in (name, f"{name}.index")]
            result[split] += (index.Shard(name, len(tokens), len(documents), size, *sums),)
    tokenizer = {"name": "tokenizer.json", "sha256": "0" * 64}
    index.write(folder, index.Index(vocab_size, dtype, tokenizer, 1, None, result, (), 0, {}))
    return folder

"""Bytes that the kernels read and write, counted in Triton's interpreter, against the min number of bytes.

The minimum is to read every input once and write every result once. *Unique* counts every address once, as if caches
were perfect; *issued* counts every access, also to rows at the edges of tiles, which two programs read, and to weights,
which all programs read. Partial sums of weight gradients are counted separately.

Run in the kernels' environment: .venv-kernels/bin/python -P benchmarks/kernels_traffic.py
Writes benchmarks/results/kernels-traffic.json.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
BATCH, TIME, CHANNELS, TOKENS = 1, 512, 512, 128


class Counter:
    """A context manager that records the interpreter's loads and stores."""

    def __enter__(self):
        from triton.runtime.interpreter import InterpreterBuilder

        self.builder, self.issued, self.addresses = InterpreterBuilder, [], []
        self.load, self.store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

        def load(builder, pointers, mask, *rest):
            self.note(pointers, mask)
            return self.load(builder, pointers, mask, *rest)

        def store(builder, pointers, value, mask, *rest):
            self.note(pointers, mask)
            return self.store(builder, pointers, value, mask, *rest)

        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
        return self

    def __exit__(self, *error):
        self.builder.create_masked_load, self.builder.create_masked_store = self.load, self.store

    def note(self, pointers, mask):
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].ravel()
        size = pointers.get_element_ty().primitive_bitwidth // 8
        self.issued.append((addresses, size))

    def bytes(self, without: tuple[int, int]) -> tuple[int, int, int]:
        """Issued and unique bytes outside the range of addresses `without`, and issued bytes inside it."""
        first, end = without
        issued = unique = apart = 0
        for size in {size for _, size in self.issued}:
            addresses = np.concatenate([some for some, its_size in self.issued if its_size == size])
            inside = (addresses >= first) & (addresses < end)
            apart += size * int(inside.sum())
            issued += size * int((~inside).sum())
            unique += size * len(np.unique(addresses[~inside]))
        return issued, unique, apart


def kernels() -> dict[str, tuple[int, int, Callable[[], object]]]:
    """name -> (min traffic, traffic of separate operations, both in units of B * T * C numbers; the call)"""
    from canonlm.ops.kernels import conv, gated, normed

    def row(channels=CHANNELS):
        return torch.randn(BATCH, TIME, channels).bfloat16()

    x, y, z, taps, weight = row(), row(), row(), torch.randn(CHANNELS, 4), torch.randn(CHANNELS)
    rstd, plain = torch.rand(BATCH, TIME), {"residual": True, "act": 0, "scale": 1.0}
    silu, bare = {"residual": True, "act": 1, "scale": 1.0}, {"residual": True, "scale": 1.0}
    last = {"return_state": False}
    pair, three = [taps, taps], [taps, taps, taps]
    return {
        "conv forward": (2, 2, lambda: conv.run_forward([x], [taps], [], None, None, None, **plain, **last)),
        "conv forward, q, k and v": (
            6,
            6,
            lambda: conv.run_forward([x, y, z], three, [], None, None, None, **plain, **last),
        ),
        "conv backward": (3, 3, lambda: conv.run_backward([y], [x], [taps], [], None, None, **plain)),
        "conv with SiLU backward": (3, 6, lambda: conv.run_backward([y], [x], [taps], [], None, None, **silu)),
        "act(gate) * up forward": (3, 7, lambda: gated.run_forward(x, y, pair, None, None, None, **silu, **last)),
        "act(gate) * up backward": (5, 11, lambda: gated.run_backward(z, x, y, pair, None, None, **silu)),
        "norm, Canon forward": (
            2,
            4,
            lambda: normed.run_forward(x, None, weight, 1e-6, taps, None, None, None, **bare, **last),
        ),
        "add, norm, Canon forward": (
            4,
            7,
            lambda: normed.run_forward(x, y, weight, 1e-6, taps, None, None, None, **bare, **last),
        ),
        "norm, Canon backward": (
            4,
            7,
            lambda: normed.run_backward(y, z, x, weight, taps, rstd, None, None, **bare),
        ),
    }


def count(call: Callable[[], object]) -> tuple[int, int, int]:
    """Issued and unique bytes of a launch, and those of its partial sums."""
    made, new_empty = [], torch.Tensor.new_empty

    def remember(self, *size, **options):
        tensor = new_empty(self, *size, **options)
        if options.get("dtype") == torch.float32 and tensor.ndim > 2:
            made.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        return tensor

    torch.Tensor.new_empty = remember
    try:
        with Counter() as counter:
            call()
    finally:
        torch.Tensor.new_empty = new_empty
    return counter.bytes(made[0] if made else (0, 0))


def table() -> list[dict]:
    from canonlm.ops.kernels import launches

    kept = launches.launch_at
    launches.launch_at = lambda *_: launches.Launch(CHANNELS, 1, stages=1, tokens=TOKENS, programs=0)
    try:
        rows = []
        for name, (least, separate, call) in kernels().items():
            floor = least * BATCH * TIME * CHANNELS * 2
            issued, unique, apart = count(call)
            rows.append(
                {
                    "kernel": name,
                    "least": least,
                    "separate": separate,
                    "issued": round(issued / floor, 4),
                    "unique": round(unique / floor, 4),
                    "partial_sums": round(apart / floor, 4),
                }
            )
        return rows
    finally:
        launches.launch_at = kept


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(HERE.parent / "tests/kernels"))
    from interpreter import correct_the_interpreter

    correct_the_interpreter()
    rows = table()
    for row in rows:
        print("  ".join(f"{value:<26}" if isinstance(value, str) else f"{value:<8}" for value in row.values()))
    shape = {
        "batch": BATCH,
        "time": TIME,
        "channels": CHANNELS,
        "tile": TOKENS,
        "dtype": "bfloat16",
        "taps": "float32, K=4",
    }
    text = json.dumps({"shape": shape, "kernels": rows}, indent=1)
    (HERE / "results/kernels-traffic.json").write_text(text + "\n")


if __name__ == "__main__":
    main()

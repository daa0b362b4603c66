"""What the initial weights of a recipe cost: several processes of one machine draw them together, on the CPU.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 8 benchmarks/initial_weights.py RECIPE [--json FILE]

The clock runs from the model without values to every process holding its shards (gloo). Once for a run that begins, and
once for one that continues from a checkpoint, which draws nothing.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path

import torch
from canon import machine, save

from canonlm.core.distributed import World
from canonlm.launch.plan import with_vocabulary
from canonlm.launch.recipes import find
from canonlm.train.build import build_model
from canonlm.train.config import RunConfig
from canonlm.train.load_config import load
from canonlm.train.mesh import world_of
from canonlm.train.sharding import parallelize


def start(config: RunConfig, world: World, resumed: bool) -> dict[str, float]:
    """Seconds of the clock until the last process is ready, and of processor time in all of them."""
    world.sum([0.0])
    began, before = time.perf_counter(), time.process_time()
    parallelize(partial(build_model, config), config, world, resumed=resumed)
    [processor] = world.sum([time.process_time() - before])
    return {"clock_s": time.perf_counter() - began, "processor_s": processor}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = with_vocabulary(load(find(options.recipe), ["train.device=cpu", "train.compile=false"]))
    with world_of(config) as world:
        begins, continues = (start(config, world, resumed) for resumed in (False, True))
        result = {"machine": machine(), "recipe": options.recipe, "processes": world.size}
        result |= {"begins": begins, "continues": continues, "parameters": build_model(config, "meta").num_parameters}
        if world.main:
            print(json.dumps(result, indent=1))
            save(result, options.json)


if __name__ == "__main__":
    main()

"""A scan of many texts by Ray, from Python: each actor holds a model and scans shards of batches of its own making.

For files of text the command line does it all, and goes on where it was stopped:

    attemper scan MODEL --texts corpus.jsonl --out parts/ --engine ray --workers 8

This is for what it cannot read: images, sensor data, a loader of yours. Needs the extra ``ray``:

    python examples/ray_scan.py
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
if not os.environ.get("RAY_ADDRESS"):
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # a Ray of this machine listens on 127.0.0.1 alone

import ray
import torch

import attemper

SHARDS = 4


@ray.remote(num_cpus=1)
class Scanner:
    """Loads the model once, and scans one shard after another."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()

    def scan(self, shard: int, folder: str) -> str:
        """Every batch is a function of its number, so a shard that is tried again is the same again."""
        batches = (torch.randn(4, 40, 32, generator=torch.Generator().manual_seed(n)) for n in range(shard, 16, SHARDS))
        scan = attemper.scan(self.model, batches, shard=(shard, SHARDS))
        return str(scan.save(Path(folder) / f"{shard}.safetensors"))


def main() -> None:
    if os.environ.get("RAY_ADDRESS"):
        ray.init()
    else:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:  # on a cluster: a folder that every node sees
        pool = ray.util.ActorPool([Scanner.remote() for _ in range(2)])
        paths = list(pool.map_unordered(lambda actor, shard: actor.scan.remote(shard, folder), range(SHARDS)))
        first, *others = map(attemper.open, paths)
        print(first.merge(*others))
    ray.shutdown()


if __name__ == "__main__":
    main()

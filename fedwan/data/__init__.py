"""Data shards: what each site trains on, and the held-out real data that quality is judged on."""

from fedwan.data.shard import Shard, check_data, open_shard
from fedwan.data.sources import Source, find_source, pair_names, source_of
from fedwan.data.splits import split_indices
from fedwan.data.stream import BatchStream

__all__ = [
    "BatchStream",
    "Shard",
    "Source",
    "check_data",
    "find_source",
    "open_shard",
    "pair_names",
    "source_of",
    "split_indices",
]

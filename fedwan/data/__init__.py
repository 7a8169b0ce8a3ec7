"""Data shards: what each site trains on, and the held-out real data that quality is judged on."""

from fedwan.data.loader import InMemory, Loader, first_leaf
from fedwan.data.shard import Shard, check_files, dataset_of, held_out_of, open_shard
from fedwan.data.sources import data_at_site, find_source, num_labels, source_of
from fedwan.workloads.base import Batch

__all__ = [
    "Batch",
    "InMemory",
    "Loader",
    "Shard",
    "check_files",
    "data_at_site",
    "dataset_of",
    "find_source",
    "first_leaf",
    "held_out_of",
    "num_labels",
    "open_shard",
    "source_of",
]

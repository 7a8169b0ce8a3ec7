"""Data shards: what each site trains on, and the held-out real data that quality is judged on."""

from fedwan.data.checks import check_data, check_files
from fedwan.data.loader import InMemory, Loader, first_leaf, num_samples_in
from fedwan.data.shard import Shard, dataset_of, held_out_of, open_shard
from fedwan.data.sources import (
    FILE_NAMES,
    Source,
    data_at_site,
    find_source,
    num_labels,
    pair_names,
    source_of,
)

__all__ = [
    "FILE_NAMES",
    "InMemory",
    "Loader",
    "Shard",
    "Source",
    "check_data",
    "check_files",
    "data_at_site",
    "dataset_of",
    "find_source",
    "first_leaf",
    "held_out_of",
    "num_labels",
    "num_samples_in",
    "open_shard",
    "pair_names",
    "source_of",
]

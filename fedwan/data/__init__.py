"""Data shards: what each site trains on, and the held-out real data that quality is judged on."""

from fedwan.data.files import FILE_NAMES, FileSource
from fedwan.data.shard import AnyShard, FileShard, Shard, check_data, data_at_site, open_shard
from fedwan.data.sources import Source, find_source, held_out_of, pair_names, source_of
from fedwan.data.splits import split_indices
from fedwan.data.stream import BatchStream, Stream
from fedwan.data.telling import num_labels

__all__ = [
    "FILE_NAMES",
    "AnyShard",
    "BatchStream",
    "FileShard",
    "FileSource",
    "Shard",
    "Source",
    "Stream",
    "check_data",
    "data_at_site",
    "find_source",
    "held_out_of",
    "num_labels",
    "open_shard",
    "pair_names",
    "source_of",
    "split_indices",
]

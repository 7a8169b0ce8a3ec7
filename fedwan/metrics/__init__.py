"""Quality of samples: distances and their floors, precision, recall, coverage, classes, modes."""

from fedwan.metrics.density_coverage import DensityCoverage, density_coverage
from fedwan.metrics.features import Features
from fedwan.metrics.frechet import (
    Moments,
    ShardMoments,
    frechet_between,
    frechet_distance,
    merge_moments,
    moments,
    shard_moments,
)
from fedwan.metrics.kernel_distance import KernelDistance, kernel_between, kernel_distance
from fedwan.metrics.modes import ModeCount, count_modes
from fedwan.metrics.precision_recall import PrecisionRecall, precision_recall
from fedwan.metrics.quality import NUM_DRAWS, measure_quality
from fedwan.metrics.stacked_modes import StackedModes, count_stacked_modes

__all__ = [
    "NUM_DRAWS",
    "DensityCoverage",
    "Features",
    "KernelDistance",
    "ModeCount",
    "Moments",
    "PrecisionRecall",
    "ShardMoments",
    "StackedModes",
    "count_modes",
    "count_stacked_modes",
    "density_coverage",
    "frechet_between",
    "frechet_distance",
    "kernel_between",
    "kernel_distance",
    "measure_quality",
    "merge_moments",
    "moments",
    "precision_recall",
    "shard_moments",
]

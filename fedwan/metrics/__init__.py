"""Quality of samples: Frechet distance and its floor, precision and recall, classes, modes."""

from fedwan.metrics.frechet import Moments, frechet_between, frechet_distance, moments
from fedwan.metrics.modes import ModeCount, count_modes
from fedwan.metrics.precision_recall import PrecisionRecall, precision_recall
from fedwan.metrics.quality import NUM_DRAWS, measure_quality

__all__ = [
    "NUM_DRAWS",
    "ModeCount",
    "Moments",
    "PrecisionRecall",
    "count_modes",
    "frechet_between",
    "frechet_distance",
    "measure_quality",
    "moments",
    "precision_recall",
]

"""Quality of samples: distances and their floors, classes, modes."""

from fedwan.metrics.quality import NUM_DRAWS, measure_quality, measure_translation, num_generated

__all__ = ["NUM_DRAWS", "measure_quality", "measure_translation", "num_generated"]

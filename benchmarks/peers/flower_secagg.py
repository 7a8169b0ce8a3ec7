"""What a client of Flower's SecAgg+ does with its vector, and the server with all of them.

Flower 1.41's own functions and default settings, called in one process; no federation runs.
"""

from __future__ import annotations

import time
from typing import Any

from flwr.common.secure_aggregation import ndarrays_arithmetic as flower
from flwr.common.secure_aggregation.quantization import quantize
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from numpy.typing import NDArray


def measure_flower(arrays: list[NDArray[Any]], num_sites: int) -> tuple[int, float, float]:
    """Bytes of a client, its seconds, and the server's with as many vectors as there are sites."""
    shapes, span = [array.shape for array in arrays], 1 << 32
    began = time.perf_counter()
    vector = quantize(arrays, 8.0, 1 << 22)
    for number in range(num_sites):  # its own mask, and one with each of the others
        mask = pseudo_rand_gen(number.to_bytes(32, "little"), span, shapes)
        vector = flower.parameters_addition(vector, mask)
    vector = flower.parameters_mod(vector, span)
    site_s = time.perf_counter() - began
    num_bytes = sum(array.nbytes for array in vector)  # int64, as it is sent
    began = time.perf_counter()
    total = vector
    for _ in range(num_sites - 1):
        total = flower.parameters_addition(total, vector)
    for number in range(num_sites):
        mask = pseudo_rand_gen(number.to_bytes(32, "little"), span, shapes)
        total = flower.parameters_subtraction(total, mask)
    total = flower.parameters_mod(total, span)
    return num_bytes, site_s, time.perf_counter() - began

"""fedwan: train one generative model across datacenters that only a wide-area network joins.

Sites take many local steps; a coordinator merges what changed, steps an outer optimiser, and sends
the result back. Importing this package costs nothing: torch is loaded by the parts that compute.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedwan.simulation import simulate
    from fedwan.site.joining import join
    from fedwan.site.site import Site
    from fedwan.weights import load

__all__ = ["Site", "__version__", "join", "load", "simulate"]

__version__ = "0.1.0"

_PLACES = {
    "Site": "fedwan.site.site",
    "join": "fedwan.site.joining",
    "load": "fedwan.weights",
    "simulate": "fedwan.simulation",
}


_MODULES = ("app", "data")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"fedwan.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'fedwan' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)

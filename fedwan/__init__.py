"""fedwan: train one generative model across datacenters that only a wide-area network joins.

Sites take many local steps; a coordinator merges what changed, steps an outer optimiser, and sends
the result back. Importing this package costs nothing: torch is loaded by the parts that compute.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"

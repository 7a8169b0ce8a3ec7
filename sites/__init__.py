"""Workload recipes, one page each, and the Flower ClientApp that runs them at a site."""

from pkgutil import extend_path

# Processes that import it again, as workers of loaders do, find pages of one's own beside it.
__path__ = extend_path(__path__, __name__)[::-1]

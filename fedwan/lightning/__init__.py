"""LightningModules as workloads, unchanged: what a trainer would be for them, a site is.

The only room that imports Lightning, which is an extra: `pip install 'fedwan[lightning]'`.
"""

"""Flower as the control plane: the only part of fedwan that knows Flower.

Flower distributes the app, lists the sites' SuperNodes, and starts and stops processes; it carries
no tensors. On the coordinator's machine `coordinator` runs SuperLink behind the front door, which
starts the ServerApp (`serverapp`); on a site's machine `site` runs a SuperNode behind the
forwarder, which starts the ClientApp (`clientapp`). Nothing here imports torch, and only `control`
and the two apps import flwr.
"""

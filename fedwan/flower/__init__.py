"""Flower as the control plane: the only part of fedwan that knows Flower.

`coordinator` runs SuperLink behind the front door, which starts the ServerApp (`serverapp`); `site`
runs a SuperNode behind the forwarder, which starts the ClientApp (`clientapp`). Nothing here
imports torch, and only `control` and the two apps import flwr.
"""

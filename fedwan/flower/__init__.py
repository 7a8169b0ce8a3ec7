"""Flower as the control plane: the only part of fedwan that knows Flower.

Flower distributes the app, lists the sites' SuperNodes, and starts and stops processes; it carries
no tensors. On the coordinator's machine `serve_coordinator` runs SuperLink on loopback behind the
mutual-TLS front door and submits the run; on a site's machine `serve_site` runs a SuperNode behind
the forwarder that holds the site's certificate. Inside Flower's own processes, `apps` is what
`strategies/server_app.py` and `sites/client_app.py` call, and `tickets` hands each site the one
message of the run.

Nothing here imports torch, and only `apps`, `tickets`, `fab` and `control` import flwr.
"""

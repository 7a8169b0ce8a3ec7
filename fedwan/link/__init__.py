"""The link: wire messages, the data plane, loopback and shaped links, and TLS identities."""

"""Tables of what fedwan does; `python -m benchmarks NAME` makes one."""

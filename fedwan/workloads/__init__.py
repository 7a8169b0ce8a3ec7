"""What a workload is, and the parts that recipes in `sites/` share."""

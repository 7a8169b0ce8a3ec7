"""The `fedwan` command, one file per group of commands."""

"""The whole federation in one process, in virtual time, with faults that a seed chooses."""

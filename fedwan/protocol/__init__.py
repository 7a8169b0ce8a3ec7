"""The federation's state machines: inputs in, effects out, time passed in; no IO, no threads."""

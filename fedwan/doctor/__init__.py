"""Which site is at fault, in which network, why, and the mend. It advises, and drops nobody."""

"""Which site is at fault, in which network, why, and what mends it. It advises, and drops nobody."""

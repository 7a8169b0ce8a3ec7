"""The coordinator: receive contributions, merge them, step the outer optimiser, send updates."""

"""A site: the inner loop, and when to upload, when to apply, when to save."""

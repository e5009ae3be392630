"""Makes the directory of a small project of the user's own: `megarl new DIR`."""

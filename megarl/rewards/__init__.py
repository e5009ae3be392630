"""Scores responses: by rules, by a custom function, by a judge or by a reward model's score."""

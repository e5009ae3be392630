"""Advantages, losses and divergences: pure functions of tensors, which know no model and no engine."""

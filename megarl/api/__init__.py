"""The names that `import megarl` offers to programs and notebooks. Nothing here imports torch.

A run that `megarl.train` starts is a process of its own, and an ordinary run in an ordinary directory.
"""

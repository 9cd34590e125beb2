"""The simulator: the real engine, scheduler and policies over a profile instead of a GPU."""

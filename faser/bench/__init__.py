"""`faser bench`: traffic in, figures out. Nothing here imports torch before a model is asked for."""

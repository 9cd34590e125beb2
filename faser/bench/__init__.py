"""The commands `faser bench` and `faser simulate`. torch is imported when a model is loaded, not before."""
